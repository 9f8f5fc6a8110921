"""Inputs of a run from a person's options: workload, load, cluster, crashes.

Every mistake is one `ConfigError` that states what was expected.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence

from msgspec import Struct, structs

from common.errors import ConfigError
from common.model import MAX_JOB_S, MAX_WORKERS, NodeName, Pool, ServiceName
from common.settings import load as load_settings
from coordinator.engine.state.settings import TenantSettings, check_tenants, overpromised
from coordinator.policies.contract.text import counted
from coordinator.sim.inputs.loads import Loads, read_loads_of, texts
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.outages import Crash
from coordinator.workloads.formats import NoFileError, find, from_first, read_jobs, read_nodes
from coordinator.workloads.named import named, seed_of
from coordinator.workloads.paper import PaperParameters
from coordinator.workloads.pools import gpu_types, node_sizes
from coordinator.workloads.proportions import in_proportion
from coordinator.workloads.records import (
    MAX_NODES,
    NodeGroup,
    Source,
    TraceJob,
    Workload,
)
from coordinator.workloads.shaping import (
    INFERENCE_GPU,
    TRAINING_GPU,
    with_checkpoint_share,
    with_elastic_share,
    with_fungible_share,
)

_HALF = r"([0-9]{1,9})x([0-9]{1,9})(?:/([1-9][0-9]{0,8}))?"
CLUSTER_SHAPE = re.compile(rf"{_HALF}(?:\+{_HALF})?")
_SECONDS = r"([0-9]{1,300}(?:\.[0-9]+)?)"
CRASH_SHAPE = re.compile(rf"([A-Za-z0-9_-]+)@{_SECONDS}\+{_SECONDS}")
SEEDS_SHAPE = re.compile(r"([0-9]{1,15})(?:\.\.([0-9]{1,15}))?")

MOST_SEEDS = 10_000
"""The limit of one call: this many runs take days, and more are most often a slip."""

DAY_S = 86_400.0

RANGES: dict[str, tuple[float, float]] = {
    "coalesce": (0.0, DAY_S),
    "loss": (0.0, 0.9),
    "pass-period": (0.001, DAY_S),
    "prerun": (1.0, MAX_JOB_S),
}
"""Options that are numbers: the least and the most of each; infinity never comes to its end."""

EXPECTED_CLUSTER = (
    "NODESxGPUS or NODESxGPUS+NODESxGPUS (training + inference), each with /NODES_PER_RACK where "
    "racks matter, or a file"
)


class _ClusterFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A cluster as TOML: `[[nodes]]` tables with the fields of `NodeGroup`."""

    nodes: tuple[NodeGroup, ...]


class _TenantsFile(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Tenants as TOML: `[[tenants]]` tables, as in the settings of a cell."""

    tenants: tuple[TenantSettings, ...]


class Shares(Struct, frozen=True, kw_only=True):
    """Shares drawn by seed where a trace lacks the property; None leaves the trace as it is."""

    elastic: float | None = None
    fungible: float | None = None
    checkpoint: float | None = None


def within(option: str, value: float) -> float:
    """A number of `RANGES`.

    Raises:
        ConfigError: it is out of its range; NaN is out of all.
    """
    low, high = RANGES[option]
    if not low <= value <= high:
        raise ConfigError(f"{option}: {value:g}, expected a number from {low:g} to {high:g}")
    return value


# --- clusters -----------------------------------------------------------------------------------


def parse_cluster(text: str) -> tuple[NodeGroup, ...]:
    """Nodes from `443x8+520x8`, or from a file: TOML, or an OpenB node list.

    Raises:
        ConfigError: neither a shape nor a readable file, or a cluster without a training GPU.
    """
    shape = CLUSTER_SHAPE.fullmatch(text)
    groups = _from_shape(shape) if shape else _from_file(text)
    for what, most, found in (
        ("nodes", MAX_NODES, sum(group.count for group in groups)),
        ("GPUs of a node", MAX_WORKERS, max((group.gpus for group in groups), default=0)),
    ):
        if found > most:
            raise ConfigError(f"cluster {text}: {found} {what}, expected at most {most}")
    training = sum(group.count * group.gpus for group in groups if group.home_pool == Pool.TRAINING)
    if training == 0:
        raise ConfigError(f"cluster {text}: no training GPU; expected {EXPECTED_CLUSTER}")
    return groups


def _from_shape(shape: re.Match[str]) -> tuple[NodeGroup, ...]:
    training, training_gpus, racks, inference, inference_gpus, inference_racks = (
        int(part or 0) for part in shape.groups()
    )
    groups = (
        NodeGroup(
            count=training,
            gpus=training_gpus,
            gpu_type=TRAINING_GPU,
            nodes_per_rack=racks or None,
        ),
        NodeGroup(
            count=inference,
            gpus=inference_gpus,
            gpu_type=INFERENCE_GPU,
            home_pool=Pool.INFERENCE,
            nodes_per_rack=inference_racks or None,
        ),
    )
    return tuple(group for group in groups if group.count and group.gpus)


def _from_file(text: str) -> tuple[NodeGroup, ...]:
    try:
        path = find(text, what="cluster")
    except NoFileError:
        raise ConfigError(
            f"cluster {text}: no such file and no shape; expected {EXPECTED_CLUSTER}"
        ) from None
    if path.suffix != ".toml":
        return read_nodes(path, skip_zero_gpus=True)[0]
    return load_settings(path, _ClusterFile).nodes


def node_specs(groups: Sequence[NodeGroup], services: Sequence[ServiceName]) -> list[NodeSpec]:
    """Every node by name; inference nodes are dealt to the services in equal runs."""
    specs: list[NodeSpec] = []
    inference = sum(group.count for group in groups if group.home_pool == Pool.INFERENCE)
    numbers = {Pool.TRAINING: 0, Pool.INFERENCE: 0}
    for group_number, group in enumerate(groups):
        for place in range(group.count):
            number = numbers[group.home_pool]
            numbers[group.home_pool] += 1
            is_training = group.home_pool == Pool.TRAINING
            service = None
            if not is_training:
                service = services[number * len(services) // inference]
            specs.append(
                NodeSpec(
                    name=NodeName(f"{'t' if is_training else 'i'}{number:05d}"),
                    home_pool=group.home_pool,
                    gpu_type=group.gpu_type,
                    gpus=group.gpus,
                    service=service,
                    rack=_rack(group, group_number, place),
                    cpus=group.cpus,
                    memory_bytes=group.memory_bytes,
                )
            )
    return specs


def node_names(specs: Sequence[NodeSpec]) -> str:
    """The names of all nodes, as one range for each pool."""
    names = [[spec.name for spec in specs if spec.home_pool == pool] for pool in Pool]
    return " and ".join(f"{found[0]} to {found[-1]}" for found in names if found)


def _rack(group: NodeGroup, group_number: int, place: int) -> str:
    """Where a node of a group stands; groups share no rack."""
    if group.nodes_per_rack is None:
        return ""
    return f"g{group_number}-r{place // group.nodes_per_rack:04d}"


# --- workloads ----------------------------------------------------------------------------------


def read_workload(
    name: str,
    *,
    seed: int | None = None,
    cluster: str | None = None,
    load: Loads = None,
    shares: Shares | None = None,
    parameters: PaperParameters | None = None,
    skip_zero_gpus: bool = False,
) -> Workload:
    """A named workload or a trace file, with its cluster and its inference load.

    Args:
        seed: which `paper`, and the choice of the shares; None is that in the name, else 1.
        cluster: None: the workload's own. A number of nodes gets the GPU types of a named
            workload's own nodes, see `in_proportion`.
        load: of one service or of several, see `loads`; None: the workload's own.
        parameters: of the generator, for a named workload.
        skip_zero_gpus: leave rows of a trace without a GPU out and count them; else an error.

    Raises:
        ConfigError: a bad value anywhere, a trace file without a cluster or with parameters, or
            parameters that the generator cannot draw from.
    """
    try:
        found = named(name, seed=seed, parameters=parameters)
    except (ValueError, ZeroDivisionError, OverflowError) as error:
        if parameters is None:
            raise
        changed = ", ".join(_changed(parameters)) or "these parameters"
        raise ConfigError(f"workload {name}: no trace comes of {changed}: {error}") from None
    if found is None:
        if parameters is not None:
            raise ConfigError(f"workload {name}: a trace file has no generator's parameters")
        found = _from_trace(name, cluster, skip_zero_gpus=skip_zero_gpus)
    if cluster is not None:
        nodes = parse_cluster(cluster)
        if CLUSTER_SHAPE.fullmatch(cluster):  # it names no types; a file does
            nodes = in_proportion(found.nodes, nodes, found.jobs)
        found = structs.replace(found, nodes=nodes)
    if load is not None:
        found = structs.replace(found, loads=read_loads_of(load))
    _check_services(found)
    drawn = _shared(found.jobs, shares or Shares(), seed_of(name, seed), found)
    return structs.replace(found, jobs=drawn)


def _changed(parameters: PaperParameters) -> Iterator[str]:
    """Which of them are not the fitted ones, as `name=value`."""
    fitted = PaperParameters()
    for name in PaperParameters.__struct_fields__:
        value = getattr(parameters, name)
        if value != getattr(fitted, name):
            yield f"{name}={value}"


def _check_services(workload: Workload) -> None:
    nodes = sum(group.count for group in workload.nodes if group.home_pool == Pool.INFERENCE)
    if 0 < nodes < len(workload.loads):
        raise ConfigError(
            f"load: {len(workload.loads)} services on {nodes} inference nodes, expected at least "
            "one node for each"
        )


def _from_trace(name: str, cluster: str | None, *, skip_zero_gpus: bool) -> Workload:
    path = find(name)
    trace = read_jobs(path, skip_zero_gpus=skip_zero_gpus)
    if cluster is None:
        raise ConfigError(
            f"workload {name}: a trace does not tell its cluster; add --cluster, {EXPECTED_CLUSTER}"
        )
    jobs = from_first(trace.jobs)
    return Workload(
        name=path.name.partition(".")[0],
        jobs=jobs,
        loads=(),
        nodes=(),
        length_s=jobs[-1].submit_s,
        source=Source(
            file=str(path),
            column=trace.gpus_column,
            types_column=trace.types_column,
            lines=trace.lines,
            skipped_zero_gpus=trace.skipped_zero_gpus,
            skipped_not_run=trace.skipped_not_run,
            put_in_order=trace.put_in_order,
        ),
    )


def reordered(workload: Workload) -> str | None:
    """That rows of the trace were not in order of submission and were put so, in one line."""
    source = workload.source
    if not source.put_in_order:
        return None
    return (
        f"{source.file}: {counted(source.put_in_order, 'row stands', 'rows stand')} behind a later "
        "submission: the trace is put in order of submission"
    )


def unused(workload: Workload, load: Loads) -> str | None:
    """Options without effect in a run of this workload, in one line; else None.

    Args:
        load: the load that was asked for; None: the workload's own.
    """
    lends = any(group.home_pool == Pool.INFERENCE for group in workload.nodes)
    if load is not None and not lends:
        return f"load {', '.join(texts(load))}: not played: the cluster has no inference nodes"
    if lends and not workload.loads:
        return f"workload {workload.name}: without --load its inference nodes lend nothing"
    return None


def unkept(workload: Workload, tenants: tuple[TenantSettings, ...]) -> str:
    """That a workload's cluster cannot keep what tenants are promised, in one line; else empty."""
    training = (group for group in workload.nodes if group.home_pool == Pool.TRAINING)
    return overpromised(tenants, sum(group.count * group.gpus for group in training))


def _shared(
    jobs: tuple[TraceJob, ...], shares: Shares, seed: int, workload: Workload
) -> tuple[TraceJob, ...]:
    for option, share in (
        ("elastic", shares.elastic),
        ("fungible", shares.fungible),
        ("checkpoint-share", shares.checkpoint),
    ):
        if share is not None and not 0.0 <= share <= 1.0:
            raise ConfigError(f"{option}: {share:g}, expected 0 to 1")
    if shares.elastic is not None:
        jobs = with_elastic_share(jobs, shares.elastic, seed, nodes=node_sizes(workload.nodes))
    if shares.fungible is not None:
        training, inference = gpu_types(workload.nodes)
        jobs = with_fungible_share(
            jobs,
            shares.fungible,
            seed,
            training_gpu=training[0],
            inference_gpu=inference,
            other_gpus=training[1:],
        )
    if shares.checkpoint is not None:
        jobs = with_checkpoint_share(jobs, shares.checkpoint, seed)
    return jobs


def read_tenants(text: str) -> tuple[TenantSettings, ...]:
    """Tenants and their guarantees, from a TOML file.

    Raises:
        ConfigError: no such file, an invalid tenant, or tenants that are no tree.
    """
    tenants = load_settings(find(text, what="tenants"), _TenantsFile).tenants
    check_tenants(tenants)
    return tenants


def parse_crash(text: str) -> Crash:
    """A crash from `t00001@3600+600`: the node, when, and how long it is down, in seconds.

    Raises:
        ConfigError: any other text.
    """
    found = CRASH_SHAPE.fullmatch(text)
    if found is None:
        raise ConfigError(f"crash {text}: expected NODE@SECONDS+SECONDS, as in t00001@3600+600")
    at_s, down_s = float(found[2]), float(found[3])
    if max(at_s, down_s) > MAX_JOB_S:
        raise ConfigError(
            f"crash {found[1]}: {max(at_s, down_s):g} s, expected at most {MAX_JOB_S:g}"
        )
    return Crash(node=NodeName(found[1]), at_s=at_s, down_s=down_s)


def parse_seeds(text: str) -> tuple[int, ...]:
    """Seeds from `3`, `1..10` or `1,4,9`.

    Raises:
        ConfigError: any other text, an empty range, or more than `MOST_SEEDS`.
    """
    seeds: list[int] = []
    for part in text.split(","):
        found = SEEDS_SHAPE.fullmatch(part.strip())
        if found is None:
            raise ConfigError(f"seeds {text}: expected a number, a range 1..10 or a list 1,4,9")
        more = range(int(found[1]), int(found[2] or found[1]) + 1)
        if len(seeds) + len(more) > MOST_SEEDS:
            raise ConfigError(f"seeds {text}: expected at most {MOST_SEEDS}")
        seeds += more
    if not seeds or len(set(seeds)) < len(seeds):
        raise ConfigError(f"seeds {text}: none, or one is given twice")
    return tuple(seeds)
