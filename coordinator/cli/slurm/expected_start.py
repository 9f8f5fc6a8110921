"""`sbatch --test-only`: when a job would start, by a plan. Nothing is submitted."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from common.model import JobSpec
from common.plans import Plan, PlanKind, Planned, PlanStart
from common.slurm import times
from common.slurm.nodelists import compress
from coordinator.cli.slurm import words
from coordinator.cli.slurm.cell import note
from coordinator.client import Client

HORIZON_S = 86_400.0
"""How far ahead is played, as by `aryl plan job`."""
PREEMPTED = "preempted"
"""An effect of a plan (`PlanEffect.what`)."""


async def run(client: Client, spec: JobSpec, asked: Mapping[str, str], now_s: float) -> int:
    """Say on stderr when a job would start; 1 where it never would, as Slurm does.

    Errors are those of `Client.ask`; a request that would be refused is one.
    """
    request = Plan(kind=PlanKind.JOB, spec=spec, horizon_s=HORIZON_S, in_full=True)
    found = await client.plan(request)
    never = found.refused or "; ".join(found.warnings)
    if never:
        note("sbatch", f"error: allocation failure: {never}")
        return 1
    for line in _lines(found, spec, asked, now_s):
        note("sbatch", line)
    return 0


def _lines(found: Planned, spec: JobSpec, asked: Mapping[str, str], now_s: float) -> Iterator[str]:
    start = found.start or PlanStart()
    job = f"Job {found.number}" if isinstance(found.number, int) else "Job"
    if start.in_s is None:
        ahead = times.short(found.played_s)
        why = start.unknown or f"it is not within the {ahead} that were played ahead"
        yield f"{job} is valid; when it starts is not known: {why}"
        for each in start.waits_for:
            yield f"  Waits for: {each}"
        return
    workers = max(1, start.gpus // spec.gpus_per_worker)
    processors = max(1, spec.cpus_per_worker) * workers
    at = times.instant(now_s + start.in_s)
    partition = asked.get("partition") or words.DEFAULT_PARTITION
    yield (
        f"{job} to start at {at} using {processors} processors on nodes {compress(start.nodes)} "
        f"in partition {partition}"
    )
    stopped = [effect.job_id for effect in found.effects if effect.what == PREEMPTED]
    if stopped:
        yield f"  Preempts: {','.join(stopped)}"
    for end in start.after:
        ends = times.instant(now_s + end.in_s)
        yield f"  After {end.job_id} ({end.name}) ends at {ends}, by {end.source}"
    yield f"  Estimated: {'; '.join(found.assumptions)}"
