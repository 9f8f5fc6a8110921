"""Whether jobs accept lent GPUs one for one because their trace names no type. Must not run them.

A job file without a type means the same live; but a trace is silent where it tells nothing, and
whoever compares policies that lend has to know how his jobs count.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from common.model import Pool
from coordinator.policies.words import counted
from coordinator.sim.compare import Task
from coordinator.sim.inputs import parse_cluster
from coordinator.sim.stage import may_lend
from coordinator.workloads.paper_runs import find_scene
from coordinator.workloads.pools import gpu_types
from coordinator.workloads.records import Workload


def of_any_type(workload: Workload) -> str:
    """How many jobs name no GPU type, in a line; empty where none does, or where inference nodes
    have no other types than training."""
    untyped = sum(not job.gpu_types for job in workload.jobs)
    training, _ = gpu_types(workload.nodes)
    serving = {each.gpu_type for each in workload.nodes if each.home_pool == Pool.INFERENCE}
    others = sorted(serving.difference(training))
    if not untyped or not others:
        return ""
    who = counted(
        untyped, "job names no GPU type: it accepts", "jobs name no GPU type: they accept"
    )
    return (
        f"{who} any, one {' or '.join(others)} for one {training[0]}; --fungible P draws which may "
        "use lent nodes and counts two for one"
    )


def lines(tasks: Sequence[Task], played: Workload) -> tuple[str, ...]:
    """A line for each workload and cluster of the tasks that there is something to say of: some
    policy lends, and there is a load, without which it cannot (`inputs.unused` says so).

    Args:
        played: the workload of the first task.

    Raises:
        ConfigError: as `Task.read`.
    """
    read = {_key(tasks[0]): played}
    said: dict[str, None] = {}
    differing = {
        (*_key(task), task.cluster, task.load is None): task
        for task in tasks
        if not _is_drawn(task) and may_lend(task.options)
    }
    for task in differing.values():
        key = _key(task)
        if key not in read:
            read[key] = task.read()
        found = read[key]
        if task.cluster is not None:
            found = structs.replace(found, nodes=parse_cluster(task.cluster))
        line = of_any_type(found)
        if line and (found.loads or task.load is not None):
            of = task.swept.get("workload", ""), task.scenario and f"scenario {task.scenario}"
            said[": ".join((*filter(None, of), line))] = None
    return tuple(said)


def _is_drawn(task: Task) -> bool:
    """Whether no job of it is without a type, whatever its trace tells."""
    return task.shares.fungible is not None or (
        task.scenario is not None and find_scene(task.scenario).draws_untold
    )


def _key(task: Task) -> tuple[object, ...]:
    """What jobs and their types hang on."""
    return task.workload, task.skip_zero_gpus, task.scenario, task.shares.fungible
