"""What `aryl up` shows: a live view while it runs, one table at the end. Must not ask anybody."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from common.api import LoanRow, Status
from coordinator.cli.render import percent
from coordinator.demo.workload import Run, Workload

BAR_WIDTH = 30
STALE_S = 5.0
"""Figures that are older are marked: no coordinator has answered since."""


def stale(age_s: float) -> str:
    """How old figures are, if that is worth a word; empty when they are of now."""
    return f"{age_s:.0f} s old: no coordinator answers" if age_s >= STALE_S else ""


def progress_line(workload: Workload, elapsed_s: float, length_s: float | None) -> str:
    """One line for a log."""
    status = workload.status
    when = f"{elapsed_s:4.0f} s" + (f" of {length_s:.0f}" if length_s is not None else "")
    if status is None:
        return f"{when}: waiting for a coordinator"
    figures = status.figures
    if old := stale(workload.age_s):
        when = f"{when}, {old}"
    return (
        f"{when}: {status.on_loan_nodes} of {status.inference_nodes} inference nodes on loan, "
        f"{status.coming_home_nodes} coming home; jobs {status.pending_jobs} waiting, "
        f"{status.running_jobs} running, {figures['jobs_finished']} finished; GPUs held "
        f"{status.training_gpus_held}/{status.training_gpus} training, "
        f"{status.on_loan_gpus_held}/{status.on_loan_gpus} on loan"
    )


def progress_view(workload: Workload, elapsed_s: float, length_s: float | None) -> RenderableType:
    """What is lent, the queue, the utilization of both pools."""
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
        f"{status.pending_jobs} waiting, {status.running_jobs} running, "
        f"{status.figures['jobs_finished']} finished",
    )
    figures = status.figures
    table.add_row(
        "so far",
        f"{figures['loans']} loans, {figures['reclaims']} reclaims "
        f"({figures['reclaims_late']} late), {figures['resizes']} resizes, "
        f"{figures['preemptions']} preemptions",
    )
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
    table.add_column()
    if old := stale(run.figures_age_s):
        table.add_row("NOT UP TO DATE", Text(f"these figures are {old}", style="bold red"))
    for name, value in _lines(run):
        table.add_row(name, value)
    parts: list[RenderableType] = [table]
    returned = [loan for loan in loans if loan.reclaim_s is not None]
    if returned:
        parts.append(_reclaims(returned))
    parts.append(
        Text(
            f"Seconds are real ones. Arrivals, run times and load ran at {run.speed:g} x; control "
            "periods did not."
        )
    )
    return Group(*parts)


def _lines(run: Run) -> list[tuple[str, str]]:
    queueing, jct = run.queueing_s, run.jct_s
    return [
        ("policy, time", f"{run.policy}, {run.duration_s:.0f} s"),
        (
            "jobs finished",
            f"{run.jobs_finished} of {run.jobs_submitted} submitted, {run.jobs_failed} failed, "
            f"{run.jobs_finished_on_loan} on lent nodes",
        ),
        (
            "queueing time",
            f"mean {queueing.mean:.1f} s, median {queueing.p50:.1f} s, p95 {queueing.p95:.1f} s",
        ),
        ("JCT", f"mean {jct.mean:.1f} s, median {jct.p50:.1f} s, p95 {jct.p95:.1f} s"),
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
            f"{run.loans}, {run.loans_cancelled} called back before they began, "
            f"{run.leases_lapsed} that ended by their TTL without an order",
        ),
        (
            "reclaims",
            f"{run.reclaims}, {run.reclaims_late} late; median {run.reclaim_s.p50:.1f} s, "
            f"longest {run.reclaim_s.max:.1f} s of {run.reclaim_deadline_s:g} s",
        ),
        ("requests", f"{run.requests_served} served, {run.requests_refused} refused"),
        ("preemptions", f"{run.preemptions}, {run.lost_gpu_s:.0f} GPU-seconds lost"),
        (
            "resizes",
            f"{run.resizes}, {run.flexible_workers_released} flexible workers released",
        ),
    ]


def _reclaims(loans: Sequence[LoanRow]) -> Table:
    table = Table(title="reclaims", title_style="bold")
    for heading in ("node", "lease", "took", "deadline", "preempted"):
        table.add_column(heading, justify="left" if heading in ("node", "lease") else "right")
    for loan in loans:
        took = f"{loan.reclaim_s:.1f} s" + (" late" if loan.is_late else "")
        deadline = f"{loan.reclaim_deadline_s or 0:g} s"
        table.add_row(loan.node, loan.lease_id, took, deadline, str(loan.realised_preemptions))
    return table
