"""Workloads that tests share, each made once: a small one of packaged data, and the paper's."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from msgspec import structs

from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.workloads.formats import from_first, read_jobs
from coordinator.workloads.named import inference_load, named
from coordinator.workloads.records import LoadSeries, Workload
from coordinator.workloads.shaping import with_checkpoint_share, with_elastic_share

SLICE = Path(__file__).parents[1] / "data" / "sim" / "itp_slice.csv"
CLUSTER = "4x8+4x8"
FEW = SLICE.with_name("itp_few.csv")
"""The slice's first jobs: enough where what is shown needs no size. On `1x16` they compete."""
FEW_JOBS = 24


@cache
def day_load() -> LoadSeries:
    """One day of the paper's inference load, in steps of 5 minutes."""
    return structs.replace(inference_load(1, days=1), name="chat")


@cache  # hundreds of tests begin with it, and a workload never changes
def small(jobs: int = 120, *, is_dense: bool = True) -> Workload:
    """The first jobs of the slice, a third elastic, half with checkpoints, eight nodes.

    is_dense: ten times as fast one after the other, so that they compete.
    """
    found = from_first(read_jobs(SLICE).jobs[:jobs])
    if is_dense:
        found = tuple(structs.replace(job, submit_s=round(job.submit_s / 10.0)) for job in found)
    found = tuple(job for job in found if job.gpus <= 32)
    found = with_elastic_share(found, 0.33, seed=1)
    found = with_checkpoint_share(found, 0.5, seed=1)
    return Workload(
        name="small",
        jobs=found,
        loads=(day_load(),),
        nodes=parse_cluster(CLUSTER),
        length_s=found[-1].submit_s,
    )


@cache
def paper(name: str) -> Workload:
    """The workload of a name that there is, such as `paper-1`.

    Fifty thousand jobs take half a second to draw, and nothing can change them afterwards.
    """
    found = named(name)
    assert found is not None, name
    return found
