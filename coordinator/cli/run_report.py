"""The output of `aryl up`: a live view while it runs, and one table at the end."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
from msgspec import Struct
from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.api import LoanRow, Status
from coordinator.demo.workload import COMING_HOME, Run, Workload
from coordinator.engine.state.accounting import Durations
from coordinator.plain_text import MISSING, percent
from coordinator.policies.contract.text import counted

BAR_WIDTH = 30
VALUE_WIDTH = 90
"""A longer value goes on in the next line, also where no terminal limits the width."""
STALE_S = 5.0
"""Figures that are older are marked: no coordinator has answered since."""


def stale(age_s: float) -> str:
    """How old figures are, if that is worth a word; empty when they are of now."""
    return f"{age_s:.0f} s old: no coordinator answers" if age_s >= STALE_S else ""


def progress_words(workload: Workload) -> str:
    """The part of a log line on this moment."""
    status = workload.status
    if status is None:
        return "waiting for a coordinator"
    figures = status.figures
    old = stale(workload.age_s)
    return (
        (f"figures {old}; " if old else "")
        + f"{status.on_loan_nodes} of {status.inference_nodes} inference nodes on loan, "
        f"{status.coming_home_nodes} coming home; jobs {_live(status)}, "
        f"{_rejected(figures['jobs_rejected'])}{figures['jobs_finished']} finished; GPUs held "
        f"{status.training_gpus_held}/{status.training_gpus} training, "
        f"{status.on_loan_gpus_held}/{status.on_loan_gpus} on loan"
        + (f"; none lent so far: {kept}" if (kept := _kept(workload)) else "")
    )


def _counted(figures: dict[str, object], one: str) -> str:
    """A figure that is named after the counted thing."""
    return counted(msgspec.convert(figures[f"{one}s"], int), one)


def _live(status: Status) -> str:
    """Every job that has not ended, by its present state."""
    counts = f"{status.pending_jobs} waiting, {status.starting_jobs} starting"
    return f"{counts}, {status.running_jobs} running{_suspended(status.suspended_jobs)}"


def _suspended(count: int) -> str:
    """Only where any is: under most policies no job ever is."""
    return f", {count} suspended" if count else ""


def _turns(figures: dict[str, object]) -> str:
    """The turns of a policy that lets jobs share GPUs; empty if there were none."""
    each = ("suspension", "migration")
    return "".join(f", {_counted(figures, one)}" for one in each if figures[f"{one}s"])


def _rejected(count: object) -> str:
    """Only where a policy refused any: under all others the word would say nothing."""
    return f"{count} rejected, " if count else ""


def _kept(workload: Workload) -> str:
    """What keeps the nodes, while none was ever lent: the last reason, after its numbers."""
    return workload.why_none_lent[-1] if workload.why_none_lent else ""


def progress_view(workload: Workload, elapsed_s: float, length_s: float | None) -> RenderableType:
    """Lent nodes, the queue, the utilization of both pools."""
    status = workload.status
    if status is None:
        return Text("waiting for a coordinator")
    title = f"aryl up  {elapsed_s:.0f} s" + (f" of {length_s:.0f} s" if length_s else "")
    heading = Text(title, style="bold")
    if old := stale(workload.age_s):
        heading.append(f"  {old}", style="bold red")
    table = Table.grid(padding=(0, 2))
    held = bar(status.training_gpus_held, status.training_gpus)
    table.add_row("training GPUs", _busy(held, workload.training_busy.last))
    held = bar(status.on_loan_gpus_held, status.on_loan_gpus)
    table.add_row("lent GPUs", _busy(held, workload.on_loan_busy.last))
    table.add_row("inference GPUs", _busy(Text(), workload.inference_busy.last))
    table.add_row("inference nodes", _lent(status))
    table.add_row(
        "jobs",
        f"{_live(status)}, {_rejected(status.figures['jobs_rejected'])}"
        f"{status.figures['jobs_finished']} finished",
    )
    figures = status.figures
    lapsed = msgspec.convert(figures["leases_lapsed"], int)
    late = f"({figures['lapses_late']} late)"
    lapses = f"{counted(lapsed, 'lease')} lapsed {late}, " if lapsed else ""
    turned = msgspec.convert(figures["turn_backs"], int)
    turns = f"{turned} turned back ({figures['turn_backs_late']} late), " if turned else ""
    table.add_row(
        "so far",
        f"{_counted(figures, 'loan')}, {_counted(figures, 'reclaim')} "
        f"({figures['reclaims_late']} late), {lapses}{turns}{_counted(figures, 'resize')}, "
        f"{_counted(figures, 'preemption')}{_turns(figures)}",
    )
    if kept := _kept(workload):
        table.add_row("none lent", kept)
    served = workload.requests
    if served.served or served.refused:
        table.add_row("requests", f"{served.served} answered, {served.refused} refused")
    return Group(heading, table)


def _busy(text: Text, ratio: float | None) -> Text:
    return text.append(f"{' held, ' if text else ''}{percent(ratio)} busy")


def _lent(status: Status) -> str:
    return (
        f"{status.serving_nodes} serving, {status.on_loan_nodes} on loan, "
        f"{status.coming_home_nodes} coming home"
    )


def bar(part: int, whole: int) -> Text:
    """A bar with its numbers."""
    filled = round(BAR_WIDTH * part / whole) if whole else 0
    text = Text("█" * filled, style="green")
    text.append("░" * (BAR_WIDTH - filled), style="dim")
    return text.append(f"  {part} of {whole}")


def run_table(run: Run, loans: Sequence[LoanRow]) -> RenderableType:
    """The one table at the end, and each reclaim against its deadline."""
    table = Table(title="aryl up", show_header=False, title_style="bold")
    table.add_column(style="cyan", no_wrap=True)
    table.add_column(max_width=VALUE_WIDTH)
    if old := stale(run.figures_age_s):
        table.add_row("NOT UP TO DATE", Text(f"these figures are {old}", style="bold red"))
    ways = _ways_home(loans)
    for name, value in _lines(run, ways):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    if ways.reclaims:
        parts.append(_reclaims(ways.reclaims))
    if ways.lapses:
        parts.append(_lapsed(ways.lapses))
    if ways.turn_backs:
        parts.append(_turned_back(ways.turn_backs))
    parts.append(
        Text(
            f"Seconds are real ones. Arrivals, run times and load ran at {run.speed:g} x; control "
            "periods did not."
        )
    )
    return Group(*parts)


class _Ways(Struct, frozen=True, kw_only=True):
    """Loans whose nodes came home, or were on their way when the run ended, by what brought them
    there."""

    reclaims: Sequence[LoanRow]
    lapses: Sequence[LoanRow]
    turn_backs: Sequence[LoanRow]


def _ways_home(loans: Sequence[LoanRow]) -> _Ways:
    """The figures count a way home from its beginning, so one that is not over has its row too."""
    under_way = [loan for loan in loans if _is_under_way(loan)]
    by_itself = [loan for loan in under_way if loan.reclaim_ordered_at_s is None]
    return _Ways(
        reclaims=[
            *(loan for loan in loans if loan.reclaim_s is not None),
            *(loan for loan in under_way if loan.reclaim_ordered_at_s is not None),
        ],
        lapses=[
            *(loan for loan in loans if loan.lapse_s is not None),
            *(loan for loan in by_itself if not loan.turned_back),
        ],
        turn_backs=[
            *(loan for loan in loans if loan.turn_back_s is not None),
            *(loan for loan in by_itself if loan.turned_back),
        ],
    )


def _is_under_way(loan: LoanRow) -> bool:
    return loan.state == COMING_HOME


def _under_way(loans: Sequence[LoanRow]) -> str:
    """How many of them were not over; empty where all were."""
    count = sum(map(_is_under_way, loans))
    return f", {count} under way at the end" if count else ""


def _lines(run: Run, ways: _Ways) -> list[tuple[str, str]]:
    return [
        ("policy, time", f"{run.policy}, {run.duration_s:.0f} s"),
        (
            "jobs finished",
            f"{run.jobs_finished} of {run.jobs_submitted} submitted, {run.jobs_failed} failed, "
            f"{_rejected(run.jobs_rejected)}{run.jobs_finished_on_loan} on lent nodes",
        ),
        (
            "jobs at the end",
            f"{run.jobs_pending} waiting, {run.jobs_starting} starting, "
            f"{run.jobs_running} running{_suspended(run.jobs_suspended)}",
        ),
        *_deadlines(run),
        ("queueing time, all jobs", _quantiles(run.queueing_s)),
        ("JCT, finished jobs", _quantiles(run.jct_s)),
        (
            "training GPUs",
            f"{percent(run.training_gpu_ratio)} held, {percent(run.training_gpu_busy_ratio)} busy",
        ),
        (
            "lent GPUs",
            f"{percent(run.on_loan_gpu_ratio)} held, {percent(run.on_loan_gpu_busy_ratio)} busy",
        ),
        ("inference GPUs", f"{percent(run.inference_gpu_busy_ratio)} busy, lent ones included"),
        (
            "loans",
            f"{run.loans}, {run.loans_cancelled} called back before their node had left, "
            f"{run.leases_lapsed} that ended by their TTL without an order",
        ),
        *_none_lent(run),
        *_lapses(run, ways.lapses),
        *_turn_backs(run, ways.turn_backs),
        (
            "reclaims",
            f"{run.reclaims}, {run.reclaims_late} late{_under_way(ways.reclaims)}; "
            f"median {_s(run.reclaim_s.p50)}, longest {_s(run.reclaim_s.max)} "
            f"of {run.reclaim_deadline_s:g} s",
        ),
        (
            "requests",
            f"{run.requests_served} served, {run.requests_refused} refused during loans, "
            f"{run.requests_refused_total} in all",
        ),
        (
            "preemptions",
            f"{run.preemptions}, {run.lost_gpu_s - run.resize_lost_gpu_s:.0f} GPU-seconds lost",
        ),
        (
            "resizes",
            f"{run.resizes}, {run.flexible_workers_released} flexible workers released, "
            f"{run.resize_lost_gpu_s:.0f} GPU-seconds lost",
        ),
        *_shared(run),
    ]


def _shared(run: Run) -> list[tuple[str, str]]:
    """Only where jobs gave way to others on their own GPUs, or were moved: most policies let no
    job do either."""
    rows: list[tuple[str, str]] = []
    if run.stalls:
        rows.append(("stalls", f"{run.stalls}, each of a job that stopped reporting progress"))
    if run.suspensions:
        why = "each to let another job compute on its GPUs"
        rows.append(("suspensions", f"{run.suspensions}, {why}"))
    if run.migrations:
        lost = f"{run.migration_lost_gpu_s:.0f} GPU-seconds lost"
        rows.append(("migrations", f"{run.migrations}, {lost}"))
    return rows


def _deadlines(run: Run) -> list[tuple[str, str]]:
    """Shown only where any was due: without deadlines none is missed."""
    if not run.deadlines_due:
        return []
    return [("deadlines", f"{run.deadlines_met} met of {run.deadlines_due} due")]


def _none_lent(run: Run) -> list[tuple[str, str]]:
    """Shown only where none was: a demo of lending that lends nothing has to show the obstacle."""
    return [("none lent", "; ".join(run.why_none_lent))] if run.why_none_lent else []


def _lapses(run: Run, loans: Sequence[LoanRow]) -> list[tuple[str, str]]:
    """Shown only where a lease ended by its TTL."""
    if not run.leases_lapsed:
        return []
    times = f"median {_s(run.lapse_s.p50)}, longest {_s(run.lapse_s.max)}"
    late = f"{run.lapses_late} late{_under_way(loans)}"
    return [("lapses", f"{run.leases_lapsed}, {late}; home again in {times}")]


def _turn_backs(run: Run, loans: Sequence[LoanRow]) -> list[tuple[str, str]]:
    """Only where a node gave a loan up before it began."""
    if not run.turn_backs:
        return []
    times = f"median {_s(run.turn_back_s.p50)}, longest {_s(run.turn_back_s.max)}"
    late = f"{run.turn_backs_late} late{_under_way(loans)}"
    return [("turned back", f"{run.turn_backs}, {late}; home again in {times}")]


def _quantiles(found: Durations) -> str:
    return f"mean {_s(found.mean)}, median {_s(found.p50)}, p95 {_s(found.p95)}"


def _s(seconds: float | None) -> str:
    """A length to a tenth of a second; an unmeasured one is not zero."""
    return MISSING if seconds is None else f"{seconds:.1f} s"


def _reclaims(loans: Sequence[LoanRow]) -> Table:
    table = _way_home_table("reclaims", "preempted")
    for loan in loans:
        preempted = str(loan.realised_preemptions)
        _add_way_home(table, loan, loan.reclaim_s, loan.reclaim_deadline_s, preempted)
    return table


def _lapsed(loans: Sequence[LoanRow]) -> Table:
    """The node has the rest of the deadline after the TTL."""
    table = _way_home_table("home by themselves: leases that ended by their TTL", "preempted")
    for loan in loans:
        preempted = str(loan.realised_preemptions)
        _add_way_home(table, loan, loan.lapse_s, loan.lapse_deadline_s, preempted)
    return table


def _turned_back(loans: Sequence[LoanRow]) -> Table:
    """No job was preempted: no worker had started yet."""
    table = _way_home_table("turned back by their nodes before they began", "why")
    for loan in loans:
        _add_way_home(table, loan, loan.turn_back_s, loan.turn_back_deadline_s, loan.turned_back)
    return table


def _way_home_table(title: str, last: str) -> Table:
    """A table of nodes that came home, with a last column of its own."""
    table = Table(title=title, title_style="bold")
    for heading in ("node", "lease", "took", "deadline", last):
        is_text = heading in ("node", "lease", "why")
        table.add_column(heading, justify="left" if is_text else "right")
    return table


def _add_way_home(
    table: Table, loan: LoanRow, took_s: float | None, deadline_s: float | None, last: str
) -> None:
    took = "under way" if took_s is None else f"{took_s:.1f} s"
    took += " late" if loan.is_late else ""
    table.add_row(loan.node, loan.lease_id, took, _promise(deadline_s), last)


def _promise(seconds: float | None) -> str:
    return MISSING if seconds is None else f"{seconds:g} s"
