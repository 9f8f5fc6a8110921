"""The nodes of a job, and the tasks, GPUs, CPUs and memory of each, by `sbatch`'s options. Pure."""

from __future__ import annotations

from collections.abc import Mapping

from msgspec import Struct

from common.errors import ConfigError
from coordinator.cli.slurm import sizes


class Shape(Struct, frozen=True, kw_only=True):
    """nodes: fewest and most; tasks, GPUs, CPUs (0: no share) and memory (0: no limit) of one.

    gpu_kind: the type in the options, as written; empty: none. has_gpus: the options ask for GPUs.
    """

    nodes: tuple[int, int]
    tasks: int
    gpus: int
    gpu_kind: str
    cpus: int
    memory_bytes: int
    has_gpus: bool


def shape_of(asked: Mapping[str, str]) -> Shape:
    """The shape of a job.

    Raises:
        ConfigError: options that contradict each other, or that do not spread evenly over nodes.
    """
    nodes = _nodes(asked)
    tasks = _tasks(asked, nodes)
    kind, gpus = _gpus(asked, nodes, tasks)
    if gpus == 0:
        raise ConfigError("0 GPUs: every job of Aryl's has at least one GPU on each node")
    gpu_count = gpus or 1
    if asked.get("ntasks-per-gpu"):
        tasks = sizes.count("ntasks-per-gpu", asked["ntasks-per-gpu"]) * gpu_count
    cpus = 0
    if asked.get("cpus-per-task"):
        cpus = sizes.count("cpus-per-task", asked["cpus-per-task"]) * tasks
    elif asked.get("cpus-per-gpu"):
        cpus = sizes.count("cpus-per-gpu", asked["cpus-per-gpu"]) * gpu_count
    units = {"mem": 1, "mem-per-cpu": cpus or tasks, "mem-per-gpu": gpu_count}
    given = [name for name in units if asked.get(name)]
    if len(given) > 1:
        raise ConfigError(f"--{' and --'.join(given)}: give one of them")
    memory = [sizes.memory_bytes(name, asked[name]) * units[name] for name in given]
    return Shape(
        nodes=nodes,
        tasks=tasks,
        gpus=gpu_count,
        gpu_kind=kind,
        cpus=cpus,
        memory_bytes=sum(memory),
        has_gpus=gpus is not None,
    )


def _nodes(asked: Mapping[str, str]) -> tuple[int, int]:
    """Fewest and most nodes; without `--nodes`, as many as the tasks need."""
    if asked.get("nodes"):
        return sizes.count_range("nodes", asked["nodes"])
    if asked.get("ntasks") and asked.get("ntasks-per-node"):
        tasks = sizes.count("ntasks", asked["ntasks"])
        each = sizes.count("ntasks-per-node", asked["ntasks-per-node"])
        count = -(-tasks // each)
        return count, count
    return 1, 1


def _tasks(asked: Mapping[str, str], nodes: tuple[int, int]) -> int:
    """Tasks of one node."""
    if not asked.get("ntasks"):
        each = asked.get("ntasks-per-node")
        return sizes.count("ntasks-per-node", each) if each else 1
    tasks = sizes.count("ntasks", asked["ntasks"])
    if nodes[0] != nodes[1]:
        raise ConfigError("--ntasks: with --nodes=MIN-MAX give --ntasks-per-node")
    if tasks % nodes[0]:
        raise ConfigError(f"--ntasks: {tasks} tasks do not spread evenly over {nodes[0]} nodes")
    return tasks // nodes[0]


def _gpus(asked: Mapping[str, str], nodes: tuple[int, int], tasks: int) -> tuple[str, int | None]:
    """GPU type and GPUs of one node; None: no option asks for any.

    Raises:
        ConfigError: two options that ask for different numbers or types.
    """
    found: dict[str, tuple[str, int]] = {}
    if asked.get("gpus-per-node"):
        found["gpus-per-node"] = sizes.gpus("gpus-per-node", asked["gpus-per-node"])
    if asked.get("gres") and (wanted := sizes.gres(asked["gres"])) is not None:
        found["gres"] = wanted
    if asked.get("gpus-per-task"):
        kind, count = sizes.gpus("gpus-per-task", asked["gpus-per-task"])
        found["gpus-per-task"] = kind, count * tasks
    if asked.get("gpus"):
        found["gpus"] = _of_all(asked["gpus"], nodes)
    counts = {count for _, count in found.values()}
    kinds = {kind.lower() for kind, _ in found.values() if kind}
    if len(counts) > 1 or len(kinds) > 1:
        said = ", ".join(f"--{name} {count} on a node" for name, (_, count) in found.items())
        raise ConfigError(f"GPUs: the options contradict each other: {said}")
    kind = next((kind for kind, _ in found.values() if kind), "")
    return kind, counts.pop() if counts else None


def _of_all(text: str, nodes: tuple[int, int]) -> tuple[str, int]:
    """`--gpus` is for the whole job."""
    kind, count = sizes.gpus("gpus", text)
    if nodes[0] != nodes[1]:
        raise ConfigError("--gpus: with --nodes=MIN-MAX give --gpus-per-node")
    if count % nodes[0]:
        raise ConfigError(f"--gpus: {count} GPUs do not spread evenly over {nodes[0]} nodes")
    return kind, count // nodes[0]
