"""`scontrol`: show jobs, nodes and partitions; hold, release, requeue and change jobs."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

from common.api import (
    ApiErrorCode,
    ArrayRow,
    Describe,
    Description,
    GetStatus,
    JobRow,
    NodeRow,
    Status,
)
from common.errors import ConfigError
from common.model import JobSpec
from common.slurm import patterns, times
from common.slurm.nodelists import compress, expand
from common.slurm.options import FLAG, Kind, Option, OptionError
from coordinator.cli.slurm import cell, scontrol_orders, words
from coordinator.cli.slurm.cell import Place, number_of, put, request_of
from coordinator.cli.slurm.node_options import features
from coordinator.cli.slurm.request import SCRIPT_PLACE
from coordinator.cli.slurm.sinfo import by_partition
from coordinator.cli.slurm.squeue import tres_per_node
from coordinator.client import ApiRefused, Client

TABLE = (
    Option("oneliner", "o", FLAG),
    Option("version", "V", FLAG),
    Option("help", "h", FLAG),
    Option("usage", "", FLAG),
    Option("all", "a", FLAG, Kind.HARMLESS),
    Option("details", "d", FLAG, Kind.HARMLESS),
    Option("quiet", "Q", FLAG, Kind.HARMLESS),
    Option("verbose", "v", FLAG, Kind.HARMLESS),
    Option("future", "F", FLAG, Kind.HARMLESS),
    Option("hide", "", FLAG, Kind.HARMLESS),
    Option("clusters", "M", kind=Kind.REFUSED, why="a command talks to one cell: set ARYL_CELL"),
    Option("uid", "u", kind=Kind.REFUSED, why="set ARYL_USER"),
    Option("json", "", FLAG, Kind.REFUSED, "use aryl job describe -o json"),
    Option("yaml", "", FLAG, Kind.REFUSED, "use aryl job describe -o json"),
)
HELP = """usage: scontrol [-o] show job [JOB] | node [NODE] | partition [NAME] | config
       scontrol show hostnames [LIST] | hostlist LIST
       scontrol hold | release | requeue | requeuehold JOB...
       scontrol update JobId=JOB KEY=VALUE...
       scontrol write batch_script JOB [FILE]
       scontrol ping

  scontrol show job 17        scontrol show hostnames "$SLURM_JOB_NODELIST"
"""
Pairs = Sequence[tuple[str, str]]


def run(arguments: list[str], place: Place) -> int:
    """Carry out one command."""
    given, others = cell.options_of(arguments, TABLE)
    options = dict(given)
    if cell.is_about_itself(options, HELP):
        return 0
    if not others:
        raise OptionError("no command given; scontrol --help lists the commands")
    command, *rest = others
    if command == "show":
        return _show(rest, place, one_line="oneliner" in options)
    if command == "write":
        return _write(rest, place)
    if command == "ping":
        return place.run(_ping)
    if command in scontrol_orders.ORDERS:
        return scontrol_orders.order(command, rest, place)
    if command == "update":
        return scontrol_orders.update(rest, place)
    known = ", ".join(("show", "write", "ping", *scontrol_orders.ORDERS, "update"))
    raise OptionError(f"invalid keyword: {command}; expected one of {known}")


async def _ping(client: Client) -> int:
    status = await client.ask(GetStatus(), Status)
    put(f"Slurmctld(primary) of cell {status.cell} is UP")
    return 0


def _show(rest: list[str], place: Place, *, one_line: bool) -> int:
    kind, *names = rest or ["job"]
    kind = kind.lower()
    # `show job=17` is the same as `show job 17`.
    kind, equals, name = kind.partition("=")
    names = [name, *names] if equals else names
    if kind in ("hostnames", "hostname"):
        return _hostnames(names, place)
    if kind in ("hostlist", "hostlistsorted"):
        return _hostlist(names, is_sorted=kind == "hostlistsorted")
    blocks = {
        ("job", "jobs", "jobid"): _jobs,
        ("node", "nodes"): _nodes,
        ("partition", "partitions"): _partitions,
        ("config",): _config,
    }
    for keywords, show in blocks.items():
        if kind in keywords:
            try:
                found = place.run(partial(show, names=names, place=place))
            except ApiRefused as refused:
                if kind.startswith("job") and refused.error.code == ApiErrorCode.NOT_FOUND:
                    return cell.unknown_job()
                raise
            for block in found:
                _put(block, one_line=one_line or kind == "config")
            return 0
    raise OptionError(f"invalid entity: {kind}; expected job, node, partition, config or hostnames")


def _put(lines: Sequence[Pairs], *, one_line: bool) -> None:
    """One thing in Slurm's form: `Key=value`, several to a line."""
    texts = [" ".join(f"{key}={value}" for key, value in pairs) for pairs in lines if pairs]
    put(" ".join(texts) if one_line else "\n   ".join(texts) + "\n")


def _hostnames(names: Sequence[str], place: Place) -> int:
    try:
        for host in expand(",".join(names) or place.environ.get("SLURM_JOB_NODELIST", "")):
            put(host)
    except ValueError as error:
        raise OptionError(f"Invalid hostlist: {error}") from None
    return 0


def _hostlist(names: Sequence[str], *, is_sorted: bool) -> int:
    if not names:
        raise OptionError("show hostlist: expected names with commas between, or a file")
    text = names[0]
    if text.startswith("/"):
        try:
            text = ",".join(Path(text).read_text().split())
        except OSError as error:
            raise ConfigError(f"{names[0]}: {error.strerror}") from None
    hosts = expand(text)
    put(compress(sorted(hosts) if is_sorted else hosts))
    return 0


# --- jobs -----------------------------------------------------------------------------------


async def _jobs(client: Client, names: Sequence[str], place: Place) -> list[Sequence[Pairs]]:
    """One block for each job: those named, or all."""
    numbers = [part for name in names for part in name.split(",") if part]
    if not numbers:
        rows = await cell.jobs(client, live_only=False)
        numbers = list(dict.fromkeys(row.job_id for row in rows))
        if not numbers:
            put("No jobs in the system")
    found = [await cell.described(client, number) for number in numbers]
    return [_job(one, now_s=place.now_s()) for one in found]


def _job(found: Description, *, now_s: float) -> Sequence[Pairs]:
    row, spec = found.job, found.spec
    assert row is not None, "a job's description has its row"
    assert spec is not None, "and its request"
    return [*_who(row, now_s), *_when(row, now_s), *_where(row), *_what(row, spec, found.why)]


def _array(row: JobRow) -> Pairs:
    """The array that a job is, or is a task of."""
    if isinstance(row.array, ArrayRow):
        tasks = cell.tasks_of(row) or row.array.indices
        return [("ArrayJobId", str(row.number)), ("ArrayTaskId", tasks)]
    asked = request_of(row)
    if asked.array_number is None:
        return []
    return [("ArrayJobId", str(asked.array_number)), ("ArrayTaskId", str(asked.array_index))]


def _who(row: JobRow, now_s: float) -> list[Pairs]:
    priority = request_of(row).priority
    return [
        [("JobId", str(row.number)), *_array(row), ("JobName", words.title(row))],
        [("UserId", row.user), ("Account", row.tenant), ("QOS", "normal")],
        [("Priority", str(priority)), ("Nice", str(-priority))],
        [
            ("JobState", words.state(row)),
            ("Reason", words.reason(row)),
            ("Dependency", words.dependency(row) or "(null)"),
        ],
        [
            ("Requeue", "1"),
            ("Restarts", str(max(0, row.attempt - 1))),
            ("BatchFlag", "1"),
            ("Reboot", "0"),
            ("ExitCode", words.exit_code(row)),
        ],
        [
            ("RunTime", times.full(words.elapsed_s(row, now_s))),
            ("TimeLimit", times.full(request_of(row).time_limit_s)),
            ("TimeMin", "N/A"),
        ],
    ]


def _when(row: JobRow, now_s: float) -> list[Pairs]:
    begun_s, end_s = words.started_s(row), words.end_s(row)
    return [
        [
            ("SubmitTime", times.instant(row.submitted_at_s)),
            ("EligibleTime", times.instant(row.submitted_at_s)),
        ],
        [("StartTime", times.instant(begun_s)), ("EndTime", times.instant(end_s))],
    ]


def _where(row: JobRow) -> list[Pairs]:
    nodes = words.nodes_of(row)
    asked = request_of(row)
    count = words.node_count(row)
    cpus = max(1, asked.cpus_per_worker) * count
    gpus = row.gpus_per_worker * count
    memory = f",mem={asked.memory_bytes_per_worker * count >> 20}M" * bool(
        asked.memory_bytes_per_worker
    )
    spread = (
        f"{count}"
        if row.min_workers == row.max_workers
        else (f"{row.min_workers}-{row.max_workers}")
    )
    return [
        [("Partition", words.partitions(row))],
        [("NodeList", compress(nodes) or "(null)")],
        [("BatchHost", nodes[0])] if nodes else [],
        [("NumNodes", spread), ("NumCPUs", str(cpus))],
        [("TRES", f"cpu={cpus}{memory},node={count},billing={gpus},gres/gpu={gpus}")],
        [("TresPerNode", tres_per_node(row))],
    ]


def _what(row: JobRow, spec: JobSpec, why: Iterable[str]) -> list[Pairs]:
    env = spec.env
    letters = _letters(row)
    output = patterns.filled(env.get("ARYL_BATCH_OUTPUT", ""), letters)
    error = patterns.filled(env.get("ARYL_BATCH_ERROR", ""), letters)
    lists = (("ReqNodeList", spec.require_nodes), ("ExcNodeList", spec.exclude_nodes))
    found: list[Pairs] = [
        [("Features", features(spec.require or ()))],
        [(name, compress(names or ()) or "(null)") for name, names in lists],
        [("Command", env.get("ARYL_BATCH_COMMAND") or spec.command[0])],
        [("WorkDir", spec.workdir)],
        [("Comment", env["SLURM_JOB_COMMENT"])] if "SLURM_JOB_COMMENT" in env else [],
        [("StdErr", error or output)],
        [("StdIn", "/dev/null")],
        [("StdOut", output)],
        [("ArylJobId", row.job_id), ("Preemptions", str(row.preemption_count))],
        [("ArylReason", "; ".join(why) or "none")],
    ]
    return found


def _letters(row: JobRow) -> dict[str, str]:
    """What the letters of a file name stand for on the first node, as far as they are known: the
    tasks of an array that wait keep `%a` and `%j`.
    """
    main, _, index = number_of(row).partition("_")
    job = str(row.number)
    nodes = words.nodes_of(row)
    return {
        **{letter: f"%{letter}" for letter in patterns.LETTERS},
        "A": main,
        "a": (index if index.isdecimal() else "%a") if index else patterns.NO_TASK,
        **({} if isinstance(row.array, ArrayRow) else {"J": f"{job}.batch", "j": job}),
        "n": "0",
        "s": "batch",
        "t": "0",
        "u": row.user,
        "x": words.title(row),
        **({"N": nodes[0]} if nodes else {}),
    }


def batch_script(spec: JobSpec) -> str:
    """The text of a job's batch script; empty where `sbatch` did not submit it."""
    texts = spec.command[SCRIPT_PLACE : SCRIPT_PLACE + 1]
    return "".join(texts) if "ARYL_BATCH_TASKS" in spec.env else ""


def _write(rest: list[str], place: Place) -> int:
    """`write batch_script JOB [FILE]`; `-` is standard output."""
    if len(rest) not in (2, 3) or rest[0] != "batch_script":
        raise OptionError("write: expected batch_script JOB [FILE]")
    found = place.run(lambda client: cell.described(client, rest[1]))
    assert found.spec is not None, "a job's description has its request"
    assert found.job is not None, "and its row"
    text = batch_script(found.spec)
    if not text:
        raise ConfigError(f"job {rest[1]} has no batch script")
    name = rest[2] if len(rest) == 3 else f"slurm-{number_of(found.job)}.sh"
    if name == "-":
        sys.stdout.write(text)
        return 0
    try:
        Path(name).write_text(text)
    except OSError as error:
        raise ConfigError(f"{name}: {error.strerror}") from None
    put(f"batch script for job {rest[1]} written to {name}")
    return 0


# --- nodes, partitions, the cell ---------------------------------------------------------------


async def _nodes(client: Client, names: Sequence[str], place: Place) -> list[Sequence[Pairs]]:
    rows = {row.node: row for row in await cell.nodes(client)}
    wanted = [node for name in names for node in expand(name)] or list(rows)
    for name in wanted:
        if name not in rows:
            raise ConfigError(f"Node {name} not found")
    reasons = {
        name: (await client.ask(Describe(kind="node", name=name), Description)).why
        for name in (wanted if names else [])
    }
    return [_node(rows[name], reasons.get(name, ())) for name in wanted]


def _node(row: NodeRow, why: Iterable[str]) -> Sequence[Pairs]:
    state = words.node_state(row).upper()
    memory = row.memory_bytes >> 20 if isinstance(row.memory_bytes, int) else 0
    cpus = row.cpus if isinstance(row.cpus, int) else 0
    alloc = f"gres/gpu={row.gpus_held}" if row.gpus_held else ""
    drained = {"DRAINED": "IDLE+DRAIN", "DRAINING": "MIXED+DRAIN"}
    return [
        [("NodeName", row.node), ("CoresPerSocket", "1")],
        [("CPUTot", str(cpus)), ("CPULoad", "N/A")],
        [("AvailableFeatures", words.features(row))],
        [("ActiveFeatures", words.features(row))],
        [("Gres", words.node_gres(row))],
        [("NodeAddr", row.node), ("NodeHostName", row.node)],
        [("RealMemory", str(memory)), ("Sockets", str(cpus)), ("Boards", "1")],
        [("State", drained.get(state, state)), ("ThreadsPerCore", "1"), ("Weight", "1")],
        [("Partitions", ",".join(words.node_partitions(row)))],
        [("CfgTRES", f"cpu={cpus},mem={memory}M,billing={row.gpus},gres/gpu={row.gpus}")],
        [("AllocTRES", alloc)],
        [("ArylRole", str(row.role)), ("ArylJobs", ",".join(row.jobs) or "(null)")],
        *([[("Reason", row.detail)]] if row.detail else []),
        *([[("ArylReason", "; ".join(why))]] if why else []),
    ]


async def _partitions(client: Client, names: Sequence[str], place: Place) -> list[Sequence[Pairs]]:
    found = by_partition(await cell.nodes(client))
    by_name = {name.lower(): name for name in found}
    wanted = [by_name.get(name.lower(), name) for name in names] or list(found)
    for name in wanted:
        if name not in found:
            raise ConfigError(f"Partition {name} not found")
    return [_partition(name, found[name]) for name in wanted]


def _partition(name: str, rows: Sequence[NodeRow]) -> Sequence[Pairs]:
    cpus = sum(row.cpus for row in rows if isinstance(row.cpus, int))
    gpus = sum(row.gpus for row in rows)
    is_default = "YES" if name == words.DEFAULT_PARTITION else "NO"
    return [
        [("PartitionName", name)],
        [("AllowGroups", "ALL"), ("AllowAccounts", "ALL"), ("AllowQos", "ALL")],
        [("Default", is_default), ("DefaultTime", "NONE"), ("Hidden", "NO")],
        [("MaxNodes", "UNLIMITED"), ("MaxTime", "UNLIMITED"), ("MinNodes", "1")],
        [("Nodes", compress(row.node for row in rows) or "(null)")],
        [("State", "UP"), ("TotalCPUs", str(cpus)), ("TotalNodes", str(len(rows)))],
        [("TRES", f"cpu={cpus},node={len(rows)},billing={gpus},gres/gpu={gpus}")],
    ]


async def _config(client: Client, names: Sequence[str], place: Place) -> list[Sequence[Pairs]]:
    """One line for each setting that clients look for."""
    status = await client.ask(GetStatus(), Status)
    values: Mapping[str, str] = {
        "ClusterName": status.cell,
        "SchedulerType": f"aryl/{status.policy}",
        "KillWait": "30 sec",
        "PreemptMode": "REQUEUE",
    }
    return [[[(f"{key:<23} ", f" {value}")]] for key, value in values.items()]
