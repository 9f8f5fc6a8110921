"""The sentences of docs/results.md: how to read it, and why a figure is off. Data only."""

from __future__ import annotations

from tools.paper_figures import FIGURES_7

HEAD = """
# Results

What `aryl simulate` gives for the runs of the paper (*Lyra*, EuroSys 2023; *Aryl* in its preprint),
beside what the paper prints.

Written by `tools/results.py` from the runs in `docs/results/paper/`, which `tools/play_results.py`
played; nothing here is typed in but the published figures and the sentences. A cell is *ours / the
paper's*; a star marks those more than 15 % apart, and below each table a sentence for each such
figure says why. A row on one seed (that of `paper-N`) has no interval; on several it is the mean
with its 95 % interval.

Three things to know before reading:

- **The paper's trace is not public.** Ours is [generated](workload-paper.md). Its free parameters
  were fitted to one row, Baseline, and to nothing else; every other row is a prediction.
- **Rules are the paper's**, not our defaults: see scenarios in [simulate](simulate.md).
  `aryl-default`, further below, is `aryl` as it is shipped.
- **The paper contradicts itself in places**: overall use of Baseline (its own parts put it at
  0.68), what a preemption ratio is counted over, Table 9's population. Such figures are printed and
  not chased.

Figures that stand in a sentence below a table and in no table were measured on another draw of the
same generator (its seed 55), not on `paper-1`.

The rows of other systems are as Lyra compares with them: Gandiva grows jobs while nobody waits, AFS
gives base demand first, Pollux' and TunedJobs' elastic jobs tune their batch size by the goodput of
[measured curves](policies/pollux.md) under an assumed noise scale.
"""

TAIL = (
    "504 jobs insist on a rare GPU type and wait for 37 to 40 h on average whatever the order, "
    "1,336 s of Basic's mean; the others wait for 43 s in Basic, less than in the paper, as to "
    "let jobs pass a gang that does not fit is enough to empty our queue: 67 s under `fifo-skip` "
    "below, 1,829 s in Baseline."
)
PASS = (
    "Most jobs wait for nothing but the next pass; the figure is our pass period of 82 s, fitted "
    "to Baseline, and not the policy's."
)
FULL = (
    "An elastic job saves at most half of its run here (w_max = 2 w_min, 14.2 h at w_min), and "
    "loans shorten no run: Basic's jobs run for 12,285 s on average, where 12,229 s are the least "
    "possible. The paper's run for 9,226 s in Basic (JCT less queueing), less than the 12,260 s "
    "that its own Baseline's 13,538 s leave by this reading."
)
USE = (
    "Work is the same, and with loans capacity is larger: with as many GPU-hours asked for as in "
    "Baseline, training nodes cannot be held more unless jobs take longer or more is asked for; "
    "the paper does not say what else ran."
)
PREEMPTED = (
    "Nodes go home often enough, but empty: of 7,471 in Basic 87 % are idle and 10 % hold flexible "
    "workers alone, as only 507 jobs are ever on one, 488 of them elastic; inelastic fungible jobs "
    "find room on training nodes. Were these to try lent nodes first, `loan-aryl` would have 9,530 "
    "guests instead of 552 and preempt 3.3 % instead of 0.4 %; more load does not do it (Basic on "
    "`paper-overload`: 0.3 %). The paper's lent nodes are 96 % held."
)
GUESTS = (
    "535 of our 552 guests are elastic jobs, which prefer lent nodes and run for hours, and start "
    "over when preempted; inelastic ones that could be guests find room on training nodes. The "
    "paper's guests are shorter, and waited longer before."
)

WHY: dict[tuple[str, str], str] = {
    ("5", "queueing mean"): TAIL,
    ("5", "queueing p50"): PASS,
    ("5", "queueing p95"): (
        "Under every policy but strict FIFO fewer than one of our jobs in twenty waits beyond a "
        "pass; in the paper the twentieth still waits for most of an hour. In Baseline no fitted "
        "figure varies more between draws (docs/workload-paper.md)."
    ),
    ("5", "JCT mean"): FULL,
    ("5", "JCT p50"): (
        "71 % of our jobs are shorter than 800 s, so the median job runs for minutes and waits for "
        "one pass, but where the order is strict."
    ),
    ("5", "JCT p95"): (
        "The longest twentieth runs for 82,000 s and more by construction, and only the elastic "
        "ones among it, 14 %, can be shortened."
    ),
    ("8", "queueing p50"): PASS,
    ("8", "queueing p75"): PASS,
    ("8", "queueing p95"): (
        "As in Table 5: where the order is not strict, fewer than one of our jobs in twenty waits "
        "beyond a pass."
    ),
    ("8", "queueing p99"): (
        "One job in a hundred insists on the rare GPU type and waits for 37 h and more on "
        "average. This quantile lies right below these, in what every order but the strict one "
        "has emptied here (see `fifo-skip` and `sjf` below) and has not in the paper."
    ),
    ("8", "JCT p50"): (
        "As in Table 5: 71 % of our jobs are shorter than 800 s, so the median job runs for "
        "minutes and waits for one pass, under Pollux for one round."
    ),
    ("8", "JCT p75"): (
        "71 % of our jobs run for less than 800 s and 27 % for 20,000 s and more: this quantile is "
        "one of the shortest of the long ones, and lower only where elastic ones among them end "
        "sooner. The fit gives it up for mean and p95 (docs/workload-paper.md)."
    ),
    ("8", "JCT p95"): (
        "The longest twentieth runs for 82,000 s and more by construction, and only the elastic "
        "ones among it, 14 %, can be shortened."
    ),
    ("8", "JCT p99"): (
        "The hundredth longest of our jobs run for about 252,000 s, which no row shortens; the "
        "paper's is half as long again under Baseline and about half of that under TunedJobs. "
        "The fit gives it up for mean and p95 (docs/workload-paper.md)."
    ),
    ("5", "training use"): USE,
    ("5", "overall use"): (
        "The paper's 0.52 in Baseline does not follow from its own parts (0.72 of training and "
        "about 0.65 of inference give 0.68); ours do."
    ),
    ("5", "preempted"): PREEMPTED,
    ("5 gains", "queueing gain"): TAIL,
    ("5 gains", "JCT gain"): FULL,
    ("6", "queueing mean"): TAIL,
    ("6", "JCT mean"): (
        "Naive placement ends 888 s earlier than Ideal itself here, not later: to favor lent "
        "nodes is what gets elastic jobs preempted (2,719 times against 16), and without "
        "checkpoints they start over, which makes up 743 s of it: with checkpoints "
        "(`checkpoint-100`) Ideal's mean is 8,333 s."
    ),
    ("6", "preempted"): (
        "Naive placement fills training nodes first, and in our trace these mostly have room: lent "
        "nodes are 2 % held under `naive-basic`, by 45 jobs in all, and 7 % under `naive-ideal`."
    ),
    **{("7", heading): GUESTS for _, heading, _ in FIGURES_7},
    ("9", "queueing gain"): (
        "The paper's gains with wrong estimates exceed its own with right ones (1.53 and 1.48), so "
        "its run is of another population; ours is Basic, where order within an empty queue "
        "hardly matters."
    ),
    ("9", "JCT gain"): "As for queueing: another population in the paper.",
    ("10", "preempted"): PREEMPTED,
    ("10", "collateral damage"): (
        "By cost, mostly idle nodes go home here (87 % in Basic) and little is vacated for them; "
        "at random, a job on several nodes is hit as soon as one of them is, and what it held on "
        "the others is vacated in vain. Compare the order of the rules only."
    ),
}
"""By table and heading."""

ROUND = (
    "Pollux shares GPUs out once in 300 s, which with passes at multiples of 82 s is once in "
    "328 s; most jobs wait for nothing but that."
)
LAST_HUNDREDTH = (
    "Under Pollux 95 % of our jobs wait for at most 315 s, less than in the paper; the mean is "
    "mostly that of the last hundredth, which insists on the rare GPU type."
)
TUNED_USE = (
    "Jobs that tune their batch size need fewer GPU-hours for the same work, and nothing here asks "
    "for what they leave; the paper does not say what else ran."
)
TUNED_GAIN = (
    "Elastic jobs are 5 % of all and 14.2 h long: if they took no time at all, the mean would fall "
    "by 2,556 s. The paper's falls by 6,381 s, of which 1,018 s are queueing."
)
IN_LINE = (
    "Strict order, as in Baseline: jobs wait behind large gangs, and the upper quantiles of such a "
    "queue differ much between draws (docs/workload-paper.md)."
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
        "Here all fungible jobs are guests, 10,582 of them, and are preempted 0.55 times each; the "
        "paper's 19.4 % of submissions are 0.92 times for each of its 21 %. 71 % of ours are over "
        "within 800 s, and lent nodes are 43 % held."
    ),
    ("5 gains", "queueing gain", "elastic-gandiva"): IN_LINE,
    ("5 gains", "queueing gain", "elastic-pollux"): LAST_HUNDREDTH,
    ("5 gains", "JCT gain", "elastic-tuned"): TUNED_GAIN,
    ("8", "queueing p50", "elastic-pollux"): ROUND,
    ("8", "queueing p75", "elastic-pollux"): ROUND,
    ("8", "queueing p95", "elastic-pollux"): ROUND,
    ("8", "queueing p75", "baseline"): (
        "Where the queue begins; not fitted: 710 to 1,920 s on the frozen traces "
        "(docs/workload-paper.md)."
    ),
    ("8", "queueing p75", "elastic-gandiva"): IN_LINE,
    ("8", "queueing p99", "elastic-gandiva"): IN_LINE,
}
"""By table, heading and row, where a row's reason is not its column's."""

BEFORE: dict[str, str] = {
    "5": "Preempted is preemptions over submissions, as the table's note has it.",
    "7": (
        "Ours is `loan-aryl`; `before` is the same jobs under Baseline. The paper does not say "
        "which of its runs the table is of."
    ),
    "8": "In print the rows of AFS and Pollux stand in each other's place; here as in Table 5.",
    "9": (
        "Ours is Basic with that part of the estimates off by up to 25 %, and jobs that do not say "
        "how far they are."
    ),
    "10": (
        "Collateral damage is GPUs that preempted jobs leave on nodes that stay, over the GPUs "
        "that go home."
    ),
    "elasticflow": (
        "Share of jobs that meet their deadline, of the 195 of the authors' trace on 16 nodes of 4 "
        "GPUs. Where the setting is *theirs* the artefact's quirks are knobs of ours; *what if* "
        "rows turn knobs to show what each is worth, *by its paper* plays the policy as published "
        "and not as the artefact does. Knobs: [qos](policies/qos.md), "
        "[gandiva](policies/gandiva.md), [tiresias](policies/tiresias.md)."
    ),
    "fair shares": (
        "100 GPUs, its documented rule: deserved quota first, what is over by weight, nobody more "
        "than it asks for. Ours is computed by the rule for [tenants](policies/tenants.md) when "
        "this page is written."
    ),
}

LACKING = ("fifo-skip", "sjf", "aryl-default")

AFTER: dict[str, str] = {
    "lacking": (
        "`fifo-skip` and `sjf` neither lend nor scale: what they gain over strict FIFO is not to "
        "the credit of loaning or scaling. `aryl-default` is `aryl` as shipped: elastic bases on "
        "training nodes first, growth that pays for its rendezvous, loans on demand only."
    ),
    "golden": (
        "One pool of GPUs, nothing takes time, preemption is free. Times of the other simulators "
        "are from a busy machine of two cores, ours are CPU seconds of one core including "
        "reading the trace. `dlas-gpu` notices late that a job has left its queue: our rows with "
        "`mixes_units` do so too, those without do not; see [Tiresias](policies/tiresias.md)."
    ),
    "elasticflow": (
        "What of theirs ours still lacks stands in [qos](policies/qos.md). Both sides' times are "
        "CPU seconds on a machine of two cores."
    ),
    "cost": (
        "CPU seconds of one core of a shared machine, drawing the workload included; Baseline's "
        "jobs are kept beside a run for Table 7, which adds to its memory."
    ),
}
