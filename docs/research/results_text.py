"""The sentences of docs/results.md that say why a figure is off. Data only: the page itself is
`templates/results.md.j2`.

No sentence about our runs holds a figure: names in braces stand for them, see
`results_figures.py`.
"""

from __future__ import annotations

from docs.research.paper_figures import FIGURES_7

TAIL = (
    "{trace.rare_jobs} jobs insist on a rare GPU type and wait for {least.rare_queueing_s h} "
    "and more in any order: {seen.basic.rare_part_s} s of Basic's mean. The others wait for "
    "{seen.basic.others_queueing_s} s in Basic, {seen.fifo-skip.others_queueing_s} s under "
    "`fifo-skip` and {seen.baseline.others_queueing_s} s in Baseline."
)
PASS = (
    "Most jobs wait for the next pass alone, by our period of {trace.pass_s} s that is fitted to "
    "Baseline."
)
TWENTIETH = (
    "Where the order is not strict, nineteen of twenty of our jobs wait for at most "
    "{most.queueing_p95_s} s."
)
FULL = (
    "An elastic job saves at most half of its run (w_max is twice w_min, and the mean of "
    "{trace.elastic_s h} is at w_min), and loans shorten no run: {basic.running_s} s on average "
    "in Basic, {basic.jct_bound_s} s at least. The paper's {theirs.basic.running_s} s "
    "(JCT less queueing) are less than the {theirs.least_running_s} s that its Baseline's "
    "{theirs.baseline.running_s} s leave by this reading."
)
USE = "The work is that of Baseline, so no more GPU time is held; the paper names no other work."
PREEMPTED = (
    "Nodes go home empty: of {basic.reclaims} in Basic {seen.basic.idle_ratio %} are idle and "
    "{seen.basic.flexible_alone_ratio %} hold flexible workers alone. Only "
    "{basic.on_loan_jobs.jobs} jobs are ever on one, {seen.basic.guests_elastic} of them elastic. "
    "If inelastic fungible jobs tried lent nodes first, `loan-aryl` would have "
    "{seen.guests-first.guests} guests instead of {loan-aryl.on_loan_jobs.jobs} and preempt "
    "{seen.guests-first.preemption_ratio %} instead of {loan-aryl.preemption_ratio %}; Basic on "
    "`paper-overload` preempts {seen.overload.preemption_ratio %}. The paper's lent nodes are "
    "{theirs.lent_use %} held."
)
GUESTS = (
    "{seen.loan-aryl.guests_elastic} of our {loan-aryl.on_loan_jobs.jobs} guests are elastic "
    "jobs, which run for hours and start over when preempted; the paper's are shorter."
)
SHORT = (
    "{trace.short_ratio %} of our jobs are shorter than {trace.short_s} s, so the median job "
    "waits for one pass, "
)
LONGEST = (
    "The longest twentieth runs for {trace.longest_s} s and more by construction; only its "
    "elastic jobs, {trace.longest_elastic_ratio %}, can be shortened."
)

DRAWN = (
    "The gain is Baseline's luck with its days, as strict FIFO is near its limit on our trace: "
    "mean queueing is {least.drawn_baseline_queueing_s} s to {most.drawn_baseline_queueing_s} s "
    "over the draws, {least.drawn_basic_queueing_s} s to {most.drawn_basic_queueing_s} s in "
    "Basic and {least.drawn_ideal_queueing_s} s to {most.drawn_ideal_queueing_s} s in Ideal."
)
DRAWN_JCT = (
    "{least.drawn_baseline_queueing_s} s to {most.drawn_baseline_queueing_s} s of Baseline's mean "
    "JCT are waiting; from its start on a job takes {least.drawn_baseline_running_s} s to "
    "{most.drawn_baseline_running_s} s, and {least.drawn_ideal_running_s} s to "
    "{most.drawn_ideal_running_s} s in Ideal."
)

WHY: dict[tuple[str, str], str] = {
    ("5", "queueing mean"): TAIL,
    ("5", "queueing p50"): PASS,
    ("5", "queueing p95"): TWENTIETH,
    ("5", "JCT mean"): FULL,
    ("5", "JCT p50"): SHORT + "but where the order is strict.",
    ("5", "JCT p95"): LONGEST,
    ("8", "queueing p75"): PASS,
    ("8", "queueing p99"): (
        "{trace.rare_ratio %} of our jobs insist on the rare GPU type and wait for "
        "{least.rare_queueing_s h} and more. This quantile lies right below them, where only "
        "strict order has a queue here."
    ),
    ("8", "JCT p75"): (
        "{trace.short_ratio %} of our jobs run for less than {trace.short_s} s and "
        "{trace.long_ratio %} for {trace.long_s} s and more: this quantile is among the shortest "
        "of the long ones. The [fit](workload-paper.md) gives it up for mean and p95."
    ),
    ("8", "JCT p99"): (
        "The hundredth longest of our jobs take {least.jct_p99_s} to {most.jct_p99_s} s in every "
        "row; the paper's take {theirs.baseline.p99_over_ours x} times ours under Baseline, and "
        "under TunedJobs {theirs.elastic-tuned.p99_ratio x} of that. Not fitted either."
    ),
    ("5", "training use"): USE,
    ("5", "overall use"): (
        "The paper's {theirs.baseline.overall_gpu_ratio x} in Baseline contradicts its own parts "
        "({theirs.baseline.training_gpu_ratio x} of training and about {theirs.inference_use x} "
        "of inference give {theirs.overall_use_by_parts x})."
    ),
    ("5", "preempted"): PREEMPTED,
    ("6", "queueing mean"): TAIL,
    ("6", "JCT mean"): (
        "Naive placement ends {naive-ideal.sooner_s} s earlier than Ideal, which favors lent nodes "
        "and so has elastic jobs preempted ({ideal.preemptions} times against "
        "{naive-ideal.preemptions}). Starts without checkpoints make up {checkpoints.sooner_s} s "
        "of it."
    ),
    ("6", "preempted"): (
        "Naive placement fills training nodes first, which mostly have room here: lent nodes are "
        "{naive-basic.on_loan_gpu_ratio %} held under `naive-basic`, by "
        "{naive-basic.on_loan_jobs.jobs} jobs in all, and {naive-ideal.on_loan_gpu_ratio %} under "
        "`naive-ideal`."
    ),
    **{("7", heading): GUESTS for _, heading, _ in FIGURES_7},
    ("9", "queueing gain"): (
        "The paper's gains with wrong estimates ({theirs.wrong-20.queueing_gain x} at best) exceed "
        "its own with right ones ({theirs.basic.queueing_gain x}): its run is of other jobs."
    ),
    ("9", "JCT gain"): (
        "Loans and scaling save as little as in Basic (*JCT mean* of Table 5). Wrong estimates "
        "cost little ({basic.jct_s.mean} s with right ones, "
        "{wrong-60.jct_s.mean} s in `wrong-60`). The paper's run is of other jobs: its queueing "
        "gains ({theirs.wrong-20.queueing_gain x} at best) exceed its own with right estimates "
        "({theirs.basic.queueing_gain x})."
    ),
    ("10", "preempted"): PREEMPTED,
    ("12", "queueing gain"): DRAWN,
    ("12", "JCT gain"): DRAWN_JCT,
    ("10", "collateral damage"): (
        "By cost, mostly idle nodes go home here ({seen.basic.idle_ratio %} in Basic); at random, "
        "one node of a job is enough to vacate its others. Compare the order of the rules only."
    ),
}
"""By table and heading."""

ROUND = (
    "Pollux shares GPUs out once in {pollux.round_s} s, which with passes at multiples of "
    "{trace.pass_s} s is once in {pollux.passes_s} s; most jobs wait for that alone."
)
LAST_HUNDREDTH = (
    "Nineteen of twenty of our jobs wait for at most {elastic-pollux.queueing_s.p95} s; at least "
    "{pollux.last_hundredth_s} s of the mean are of the last hundredth, and {trace.rare_ratio %} "
    "insist on the rare GPU type."
)
TUNED_USE = (
    "Jobs that tune their batch size need fewer GPU-hours, and no other job asks for the rest."
)
TUNED_GAIN = (
    "Elastic jobs are {trace.elastic_ratio %} of all and {trace.elastic_s h} long: if they took no "
    "time at all, the mean running time would fall by {trace.elastic_part_s} s. The paper's JCT "
    "falls by {theirs.elastic-tuned.sooner_s} s, {theirs.elastic-tuned.queueing_less_s} s of them "
    "queueing."
)
IN_LINE = (
    "Strict order, as in Baseline: jobs wait behind large gangs, with upper quantiles that differ "
    "[much between draws](workload-paper.md)."
)

WHY_OF_ROW: dict[tuple[str, str, str], str] = {
    ("5", "queueing mean", "elastic-pollux"): LAST_HUNDREDTH,
    ("5", "queueing mean", "elastic-gandiva"): IN_LINE,
    ("5", "queueing p50", "elastic-pollux"): ROUND,
    ("5", "queueing p95", "elastic-pollux"): ROUND,
    ("5", "JCT mean", "elastic-tuned"): TUNED_GAIN,
    ("5", "training use", "elastic-pollux"): TUNED_USE,
    ("5", "training use", "elastic-tuned"): TUNED_USE,
    ("5", "preempted", "loan-opportunistic"): (
        "{loan-opportunistic.on_loan_jobs.jobs} of {trace.fungible_jobs} fungible jobs are guests, "
        "preempted {loan-opportunistic.preemptions_each x} times each; the paper's "
        "{theirs.loan-opportunistic.preemption_ratio %} of submissions are "
        "{theirs.loan-opportunistic.preemptions_each x} for each of its {theirs.fungible_ratio %}. "
        "{trace.fungible_short_ratio %} of ours run for less than {trace.short_s} s, and lent "
        "nodes are {loan-opportunistic.on_loan_gpu_ratio %} held."
    ),
    ("8", "queueing p75", "elastic-pollux"): ROUND,
    ("8", "queueing p75", "baseline"): (
        "Where the queue begins; not fitted, and different [between draws](workload-paper.md)."
    ),
    ("8", "queueing p75", "elastic-gandiva"): IN_LINE,
    ("8", "queueing p99", "elastic-gandiva"): IN_LINE,
}
"""By table, heading and row, where a row's reason is not its column's."""

LACKING = (
    *("fifo-skip", "sjf", "sjf-advanced", "sjf-heterogeneous", "sjf-ideal", "sjf-elastic-tuned"),
    *("sjf-wrong-20", "sjf-wrong-40", "sjf-wrong-60", "aryl-default"),
)
