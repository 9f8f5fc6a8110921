"""Notes on jobs whose trace has no GPU types or worker ranges: how they count.

A job file without a type means the same in a live cell. But a trace is silent where it records
nothing. A comparison of policies that lend must state how its jobs count, or the draws instead.
"""

from __future__ import annotations

from collections.abc import Sequence

from msgspec import structs

from common.model import Pool
from coordinator.policies.contract.text import counted
from coordinator.sim.inputs.inputs import parse_cluster
from coordinator.sim.run.build import may_lend, never_lends
from coordinator.sim.run.compare import Task
from coordinator.workloads.paper import ELASTIC_SHARE, FUNGIBLE_SHARE
from coordinator.workloads.paper_runs import find_scene
from coordinator.workloads.pools import gpu_types
from coordinator.workloads.records import Workload
from coordinator.workloads.untold import has_no_ranges, untyped


def of_any_type(workload: Workload) -> str:
    """How many jobs name no GPU type, in a line; empty where none does, or where inference nodes
    have no other types than training."""
    found = len(untyped(workload.jobs))
    training, inference = gpu_types(workload.nodes)
    serving = {each.gpu_type for each in workload.nodes if each.home_pool == Pool.INFERENCE}
    others = sorted(serving.difference(training))
    if not found or not others:
        return ""
    who = counted(found, "job names no GPU type: it accepts", "jobs name no GPU type: they accept")
    line = f"{who} any, one {' or '.join(others)} for one {training[0]}"
    if inference not in others:
        return line
    return f"{line}; --fungible P draws which may use {inference}, two for one"


def of_drawn(workload: Workload, task: Task) -> str:
    """One line on what a task's scenario draws because the trace lacks it; empty where the trace
    has it, or where the scenario or a share option decides it anyway.
    """
    scene = None if task.scenario is None else find_scene(task.scenario)
    if scene is None or not scene.draws_untold:
        return ""
    said: list[str] = []
    found = len(untyped(workload.jobs))
    training, inference = gpu_types(workload.nodes)
    if found and "fungible" not in scene.sets and inference not in {"", *training}:
        who = counted(found, "job that names", "jobs that name")
        said.append(f"{100 * FUNGIBLE_SHARE:g} % of {who} no GPU type may use {inference}, too")
    is_given = task.shares.elastic is not None or "elastic" in scene.sets
    if not is_given and has_no_ranges(workload.jobs):
        said.append(f"{100 * ELASTIC_SHARE:g} % of the jobs are elastic, as none has a range")
    return f"drawn by seed: {'; '.join(said)}" if said else ""


def lines(tasks: Sequence[Task], played: Workload) -> tuple[str, ...]:
    """One line for all notes on the jobs of each trace and cluster of the tasks.

    Jobs of any type are noted if some policy lends and there is a load, without which it cannot
    (`inputs.unused` reports that).

    Args:
        played: the workload of the first task.

    Raises:
        ConfigError: as `Task.read`.
    """
    read = {_key(tasks[0]): played} if tasks[0].scenario is None else {}
    said: dict[tuple[str, str], dict[str, None]] = {}
    differing = {
        (*_key(task), task.cluster, task.scenario, _is_lending(task)): task for task in tasks
    }
    for task in differing.values():
        if task.scenario is None and not (_is_lending(task) and task.shares.fungible is None):
            continue
        key = _key(task)
        if key not in read:
            read[key] = structs.replace(task, scenario=None).read()
        found = read[key]
        if task.cluster is not None:
            found = structs.replace(found, nodes=parse_cluster(task.cluster))
        line = of_drawn(found, task) if _is_drawn(task) else ""
        if not _is_drawn(task) and _is_lending(task) and found.loads:
            line = of_any_type(found)
        if line:
            said.setdefault((_where(task), line), {})[task.scenario or ""] = None
    return tuple(
        ": ".join(filter(None, (where, _scenarios(names), line)))
        for (where, line), names in said.items()
    )


def _is_lending(task: Task) -> bool:
    return may_lend(task.options) and not never_lends(task.options)


def _is_drawn(task: Task) -> bool:
    """Whether its scenario draws what its trace does not tell."""
    return task.scenario is not None and find_scene(task.scenario).draws_untold


def _where(task: Task) -> str:
    """Which trace and cluster, where these are swept."""
    cluster = task.swept.get("cluster", "")
    return ": ".join(
        filter(None, (task.swept.get("workload", ""), cluster and f"cluster {cluster}"))
    )


def _scenarios(names: dict[str, None]) -> str:
    told = ", ".join(filter(None, names))
    return told and f"scenario {told}"


def _key(task: Task) -> tuple[object, ...]:
    """What the types and ranges of jobs depend on, apart from the cluster; scenarios come after
    them.
    """
    return task.workload, task.skip_zero_gpus, task.shares.fungible, task.shares.elastic
