"""`squeue`: jobs that wait, run or have just ended."""

from __future__ import annotations

import json
from collections.abc import Mapping

from msgspec import Struct

from common.api import JobRow
from common.errors import ArylError
from common.model import JobState
from common.plans import Plan, PlanKind, PlanTurn
from common.slurm import times
from common.slurm.nodelists import compress
from common.slurm.options import FLAG, MAYBE, Kind, Option
from coordinator.cli.slurm import cell, words
from coordinator.cli.slurm.cell import Place, note, number_of, put, request_of
from coordinator.cli.slurm.choosing import Choice
from coordinator.cli.slurm.formats import Field, Format, of_letters, of_names
from coordinator.client import Client

TABLE = (
    Option("jobs", "j"),
    Option("user", "u"),
    Option("me", "", FLAG),
    Option("name", "n"),
    Option("states", "t"),
    Option("account", "A"),
    Option("partition", "p"),
    Option("format", "o"),
    Option("Format", "O"),
    Option("noheader", "h", FLAG),
    Option("long", "l", FLAG),
    Option("start", "", FLAG),
    Option("sort", "S"),
    Option("json", "", MAYBE),
    Option("version", "V", FLAG),
    Option("help", "", FLAG),
    Option("usage", "", FLAG),
    Option("all", "a", FLAG, Kind.HARMLESS),
    Option("array", "r", FLAG, Kind.HARMLESS),
    Option("array-unique", "", FLAG, Kind.HARMLESS),
    Option("hide", "", FLAG, Kind.HARMLESS),
    Option("local", "", FLAG, Kind.HARMLESS),
    Option("federation", "", FLAG, Kind.HARMLESS),
    Option("verbose", "v", FLAG, Kind.HARMLESS),
    Option("only-job-state", "", FLAG, Kind.HARMLESS),
    Option("expand-patterns", "", FLAG, Kind.HARMLESS),
    Option("priority", "P", FLAG, Kind.HARMLESS),
    Option("clusters", "M", kind=Kind.REFUSED, why="a command talks to one cell: set ARYL_CELL"),
    Option("iterate", "i", kind=Kind.REFUSED, why="use watch(1), or aryl top"),
    Option("steps", "s", MAYBE, Kind.REFUSED, "Aryl keeps no list of steps"),
    Option("nodelist", "w", kind=Kind.REFUSED, why="use aryl node describe"),
    Option("licenses", "L", kind=Kind.REFUSED, why="Aryl counts no licenses"),
    Option("qos", "q", kind=Kind.REFUSED, why="a tenant has the limits"),
    Option("reservation", "R", kind=Kind.REFUSED, why="Aryl keeps no reservations"),
    Option("yaml", "", MAYBE, Kind.REFUSED, "use --json"),
)
DEFAULT = "%.18i %.9P %.8j %.8u %.2t %.10M %.6D %R"
LONG = "%.18i %.9P %.8j %.8u %.8T %.10M %.9l %.6D %R"
START = "%.18i %.9P %.8j %.8u %.2t %.19S %.6D %20Y %R"
HELP = """usage: squeue [OPTION...]

List jobs. -o takes Slurm's letters, -O its names. %r is Slurm's code for why a job waits; the name
Sentence is the whole reason. --start has the coordinator play ahead, and shows when and where the
jobs that wait are expected to start.

  squeue --me -O JobID:8,State:12,Sentence:100
"""


class Line(Struct, frozen=True):
    """A job at an instant. turn: its expected start, where one was asked for and is known."""

    row: JobRow
    now_s: float
    turn: PlanTurn | None = None


def _reason(line: Line) -> str:
    if line.row.state == JobState.PENDING:
        return f"({words.reason(line.row)})"
    nodes = compress(words.nodes_of(line.row))
    return nodes or f"({words.reason(line.row)})"


def _start_s(line: Line) -> float | None:
    """When a job ran, or is expected to run."""
    begun_s = words.started_s(line.row)
    return begun_s if begun_s is not None or line.turn is None else line.now_s + line.turn.in_s


def _planned_nodes(line: Line) -> str:
    return compress(line.turn.nodes) if line.turn is not None and line.turn.nodes else "(null)"


def _left(line: Line) -> str:
    limit_s = request_of(line.row).time_limit_s
    if limit_s is None:
        return "UNLIMITED"
    return times.short(max(0.0, limit_s - words.elapsed_s(line.row, line.now_s)))


def _cpus(line: Line) -> str:
    return str(max(1, request_of(line.row).cpus_per_worker) * words.node_count(line.row))


def _memory(line: Line) -> str:
    size = request_of(line.row).memory_bytes_per_worker
    return f"{size >> 20}M" if size else "0"


def tres_per_node(row: JobRow) -> str:
    """GPUs of one node of a job."""
    types = request_of(row).gpu_types
    kind = f":{words.partition(types[0])}" if len(types) == 1 else ""
    return f"gres/gpu{kind}:{row.gpus_per_worker}"


LETTERS: Mapping[str, Field[Line]] = {
    "A": Field("JOBID", lambda line: str(line.row.number)),
    "B": Field("EXEC_HOST", lambda line: next(iter(words.nodes_of(line.row)), "n/a")),
    "C": Field("CPUS", _cpus),
    "D": Field("NODES", lambda line: str(words.node_count(line.row))),
    "E": Field("DEPENDENCY", lambda line: words.dependency(line.row) or "(null)"),
    "F": Field("ARRAY_JOB_ID", lambda line: number_of(line.row).partition("_")[0]),
    "K": Field("ARRAY_TASK_ID", lambda line: number_of(line.row).partition("_")[2] or "N/A"),
    "L": Field("TIME_LEFT", _left),
    "M": Field("TIME", lambda line: times.short(words.elapsed_s(line.row, line.now_s))),
    "N": Field("NODELIST", lambda line: compress(words.nodes_of(line.row))),
    "P": Field("PARTITION", lambda line: words.partitions(line.row)),
    "Q": Field("PRIORITY", lambda line: str(request_of(line.row).priority)),
    "R": Field("NODELIST(REASON)", _reason),
    "S": Field("START_TIME", lambda line: times.instant(_start_s(line), missing="N/A")),
    "T": Field("STATE", lambda line: words.state(line.row)),
    "U": Field("USER", lambda line: line.row.user),
    "V": Field("SUBMIT_TIME", lambda line: times.instant(line.row.submitted_at_s)),
    "Y": Field("SCHEDNODES", _planned_nodes),
    "Z": Field("WORK_DIR", lambda line: request_of(line.row).workdir),
    "a": Field("ACCOUNT", lambda line: line.row.tenant),
    "b": Field("TRES_PER_NODE", lambda line: tres_per_node(line.row)),
    "c": Field("MIN_CPUS", lambda line: str(max(1, request_of(line.row).cpus_per_worker))),
    "e": Field("END_TIME", lambda line: times.instant(words.end_s(line.row), missing="N/A")),
    "f": Field("FEATURES", lambda line: "(null)"),
    "i": Field("JOBID", lambda line: number_of(line.row)),
    "j": Field("NAME", lambda line: words.title(line.row)),
    "k": Field("COMMENT", lambda line: request_of(line.row).comment or "(null)"),
    "l": Field("TIME_LIMIT", lambda line: times.short(request_of(line.row).time_limit_s)),
    "m": Field("MIN_MEMORY", _memory),
    "p": Field("PRIORITY", lambda line: str(request_of(line.row).priority)),
    "q": Field("QOS", lambda line: "normal"),
    "r": Field("REASON", lambda line: words.reason(line.row)),
    "t": Field("ST", lambda line: words.compact(line.row)),
    "u": Field("USER", lambda line: line.row.user),
    "v": Field("RESERVATION", lambda line: "(null)"),
    "y": Field("NICE", lambda line: str(-request_of(line.row).priority)),
}
NAMES: Mapping[str, Field[Line]] = {
    "Account": LETTERS["a"],
    "ArrayJobID": LETTERS["F"],
    "ArrayTaskID": LETTERS["K"],
    "BatchHost": LETTERS["B"],
    "Comment": LETTERS["k"],
    "Dependency": LETTERS["E"],
    "EndTime": LETTERS["e"],
    "JobArrayID": LETTERS["i"],
    "JobID": LETTERS["A"],
    "MinCpus": LETTERS["c"],
    "MinMemory": LETTERS["m"],
    "Name": LETTERS["j"],
    "Nice": LETTERS["y"],
    "NodeList": LETTERS["N"],
    "NumCPUs": LETTERS["C"],
    "NumNodes": LETTERS["D"],
    "Partition": LETTERS["P"],
    "Priority": LETTERS["p"],
    "PriorityLong": LETTERS["Q"],
    "QOS": LETTERS["q"],
    "Reason": LETTERS["r"],
    "ReasonList": LETTERS["R"],
    "SchedNodes": LETTERS["Y"],
    "Sentence": Field("SENTENCE", lambda line: words.sentence(line.row)),
    "StartTime": LETTERS["S"],
    "State": LETTERS["T"],
    "StateCompact": LETTERS["t"],
    "SubmitTime": LETTERS["V"],
    "TimeLeft": LETTERS["L"],
    "TimeLimit": LETTERS["l"],
    "TimeUsed": LETTERS["M"],
    "UserName": LETTERS["u"],
    "WorkDir": LETTERS["Z"],
    "tres-per-node": LETTERS["b"],
}
ORDER = ("COMPLETING", "RUNNING", "CONFIGURING", "SUSPENDED", "PENDING")
"""Pending jobs come last in the list of Slurm's; within a state the priority decides."""


def run(arguments: list[str], place: Place) -> int:
    """List jobs."""
    given, others = cell.options_of(arguments, TABLE)
    options = dict(given)
    if cell.is_about_itself(options, HELP):
        return 0
    if others:
        raise cell.stray(others)
    if "start" in options and not {"states", "jobs"} & set(options):
        given.append(("states", "PENDING"))
    choice = Choice(given, user=place.target().user, live_only=True)
    form = _format(options, place)

    has_starts = "start" in options
    lines = place.run(lambda client: _lines(client, place, choice, has_starts=has_starts))
    if lines is None:
        return cell.unknown_job()
    lines.sort(key=_by_start if has_starts else _by_state)
    if "json" in options:
        put(json.dumps({"jobs": [_plain(line) for line in lines]}))
        return 0
    if "noheader" not in options:
        put(form.heading())
    for line in lines:
        put(form.line(line))
    return 0


async def _lines(
    client: Client, place: Place, choice: Choice, *, has_starts: bool
) -> list[Line] | None:
    """The jobs that are meant; None: one was named, and the cell does not know it.

    As in Slurm, of several jobs those that it does not know are passed over.
    """
    found = await cell.jobs(client, live_only=not choice.wants_ended)
    is_listed = len(choice.numbers) != 1 or any(map(choice.is_named, found))
    if not is_listed and not await cell.knows(client, *choice.numbers):
        return None
    rows = [row for row in found if choice.passes(row)]
    has_waiting = any(row.state == JobState.PENDING for row in rows)
    turns = await _turns(client) if has_starts and has_waiting else {}
    return [Line(row, place.now_s(), turns.get(row.job_id)) for row in rows]


async def _turns(client: Client) -> dict[str, PlanTurn]:
    """The expected starts of the jobs that wait, by a plan of the queue. Without a plan there are
    none, and a note on stderr says why.
    """
    try:
        found = await client.plan(Plan(kind=PlanKind.QUEUE))
    except ArylError as error:
        note("squeue", f"no start is known: {error}")
        return {}
    return {turn.job_id: turn for turn in found.turns or ()}


def _by_state(line: Line) -> tuple[int, int]:
    return _place(line.row), -request_of(line.row).priority


def _by_start(line: Line) -> tuple[bool, float]:
    start_s = _start_s(line)
    return start_s is None, start_s or 0.0


def _format(options: Mapping[str, str], place: Place) -> Format[Line]:
    if "Format" in options:
        return of_names(options["Format"], NAMES)
    default = LONG if "long" in options else START if "start" in options else DEFAULT
    return of_letters(
        options.get("format") or place.environ.get("SQUEUE_FORMAT") or default, LETTERS
    )


def _place(row: JobRow) -> int:
    state = words.state(row)
    return ORDER.index(state) if state in ORDER else len(ORDER)


def _plain(line: Line) -> dict[str, object]:
    """A job as JSON: Slurm's words beside Aryl's own row."""
    row = line.row
    return {
        "job_id": row.number,
        "name": words.title(row),
        "user_name": row.user,
        "account": row.tenant,
        "partition": words.partitions(row),
        "job_state": [words.state(row)],
        "state_reason": words.reason(row),
        "state_description": words.sentence(row),
        "nodes": compress(words.nodes_of(row)),
        "node_count": words.node_count(row),
        "time_limit_s": request_of(row).time_limit_s,
        "submit_time": row.submitted_at_s,
        "dependency": words.dependency(row),
        "start_time": _start_s(line),
        "end_time": words.end_s(row),
        "aryl_job_id": row.job_id,
        "preemption_count": row.preemption_count,
    }
