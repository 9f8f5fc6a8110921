"""`sacct`: jobs with their times and exit codes: those that the cell knows, and its history."""

from __future__ import annotations

import re
from collections.abc import Mapping

from msgspec import Struct

from common.api import JobRow
from common.model import JobState
from common.slurm import times
from common.slurm.nodelists import compress
from common.slurm.options import FLAG, MAYBE, Kind, Option, OptionError
from coordinator.cli.slurm import cell, past, words
from coordinator.cli.slurm.cell import Place, number_of, put, request_of
from coordinator.cli.slurm.choosing import Choice, main_number
from coordinator.cli.slurm.formats import Field, Piece, table
from coordinator.client import Client

TABLE = (
    Option("jobs", "j"),
    Option("user", "u"),
    Option("uid", ""),
    Option("allusers", "a", FLAG),
    Option("accounts", "A"),
    Option("account", ""),
    Option("name", ""),
    Option("partition", "r"),
    Option("state", "s"),
    Option("starttime", "S"),
    Option("endtime", "E"),
    Option("format", "o"),
    Option("brief", "b", FLAG),
    Option("long", "l", FLAG),
    Option("noheader", "n", FLAG),
    Option("parsable", "p", FLAG),
    Option("parsable2", "P", FLAG),
    Option("delimiter", ""),
    Option("helpformat", "e", FLAG),
    Option("clusters", "M"),
    Option("version", "V", FLAG),
    Option("help", "h", FLAG),
    Option("usage", "", FLAG),
    Option("allocations", "X", FLAG, Kind.HARMLESS),
    Option("allclusters", "L", FLAG, Kind.HARMLESS),
    Option("duplicates", "D", FLAG, Kind.HARMLESS),
    Option("truncate", "T", FLAG, Kind.HARMLESS),
    Option("noconvert", "", FLAG, Kind.HARMLESS),
    Option("units", "", kind=Kind.HARMLESS),
    Option("array", "", FLAG, Kind.HARMLESS),
    Option("verbose", "v", FLAG, Kind.HARMLESS),
    Option("nodelist", "N", kind=Kind.REFUSED, why="use aryl job list --all -o wide"),
    Option("nnodes", "i", kind=Kind.REFUSED, why="use --format=JobID,NNodes"),
    Option("ncpus", "I", kind=Kind.REFUSED, why="use --format=JobID,NCPUS"),
    Option("qos", "q", kind=Kind.REFUSED, why="a tenant has the limits"),
    Option("json", "", MAYBE, Kind.REFUSED, "use aryl job list --all -o json"),
    Option("yaml", "", MAYBE, Kind.REFUSED, "use aryl job list --all -o json"),
    Option("batch-script", "B", FLAG, Kind.REFUSED, "use scontrol write batch_script JOB -"),
    Option("file", "f", kind=Kind.REFUSED, why="Aryl keeps no files of accounting"),
)
DEFAULT = "JobID,JobName,Partition,Account,AllocCPUS,State,ExitCode"
BRIEF = "JobID,State,ExitCode"
_FIRST_INDEX = re.compile(r"^\d+_\[?(\d+)", re.ASCII)
LONG = f"{DEFAULT},Submit,Start,End,Elapsed,Timelimit,NNodes,NodeList,AllocTRES,User"
HELP = """usage: sacct [OPTION...]

List jobs, ended ones too; without -j those of today. What the cell has forgotten comes from its
history, for the jobs of your tenant. --helpformat lists the fields.

  sacct -j 17 --format=JobID,State,ExitCode,Elapsed
"""


class Line(Struct, frozen=True):
    """A job at an instant."""

    row: JobRow
    now_s: float


def _state(line: Line) -> str:
    return words.accounted(line.row)


def _tres(line: Line) -> str:
    row = line.row
    if row.started_at_s is None:
        return ""
    nodes = words.node_count(row)
    memory = request_of(row).memory_bytes_per_worker * nodes
    parts = [f"billing={nodes * row.gpus_per_worker}", f"cpu={_cpus(line)}"]
    parts += [f"gres/gpu={nodes * row.gpus_per_worker}"]
    parts += [f"mem={memory >> 20}M"] if memory else []
    return ",".join([*parts, f"node={nodes}"])


def _requested(line: Line) -> str:
    row = line.row
    gpus = row.min_workers * row.gpus_per_worker
    return f"cpu={_asked_cpus(line)},gres/gpu={gpus},node={row.min_workers}"


def _asked_cpus(line: Line) -> str:
    return str(max(1, request_of(line.row).cpus_per_worker) * line.row.min_workers)


def _cpus(line: Line) -> str:
    return str(max(1, request_of(line.row).cpus_per_worker) * words.node_count(line.row))


def _elapsed_s(line: Line) -> float:
    return words.elapsed_s(line.row, line.now_s)


def _cpu_s(line: Line) -> float:
    return words.cpu_s(line.row, line.now_s)


def _limit(line: Line) -> str:
    return times.full(request_of(line.row).time_limit_s)


def _memory(line: Line) -> str:
    size = request_of(line.row).memory_bytes_per_worker
    return f"{size >> 20}M" if size else "0"


def _nodes(line: Line) -> str:
    return compress(words.nodes_of(line.row)) or "None assigned"


def _empty(line: Line) -> str:
    return ""


FIELDS: Mapping[str, tuple[int, Field[Line]]] = {
    "Account": (10, Field("Account", lambda line: line.row.tenant)),
    "AllocCPUS": (10, Field("AllocCPUS", _cpus)),
    "AllocNodes": (10, Field("AllocNodes", lambda line: str(words.node_count(line.row)))),
    "AllocTRES": (30, Field("AllocTRES", _tres)),
    "AveCPU": (10, Field("AveCPU", _empty)),
    "AveRSS": (10, Field("AveRSS", _empty)),
    "Cluster": (10, Field("Cluster", _empty)),
    "Comment": (14, Field("Comment", lambda line: request_of(line.row).comment)),
    "CPUTime": (10, Field("CPUTime", lambda line: times.full(_cpu_s(line)))),
    "CPUTimeRAW": (10, Field("CPUTimeRAW", lambda line: f"{_cpu_s(line):.0f}")),
    "DerivedExitCode": (15, Field("DerivedExitCode", lambda line: words.exit_code(line.row))),
    "Elapsed": (10, Field("Elapsed", lambda line: times.full(_elapsed_s(line)))),
    "ElapsedRaw": (10, Field("ElapsedRaw", lambda line: f"{_elapsed_s(line):.0f}")),
    "Eligible": (19, Field("Eligible", lambda line: times.instant(line.row.submitted_at_s))),
    "End": (19, Field("End", lambda line: times.instant(line.row.finished_at_s))),
    "ExitCode": (8, Field("ExitCode", lambda line: words.exit_code(line.row))),
    "Group": (9, Field("Group", _empty)),
    "JobID": (-12, Field("JobID", lambda line: number_of(line.row))),
    "JobIDRaw": (-12, Field("JobIDRaw", lambda line: str(line.row.number))),
    "JobName": (10, Field("JobName", lambda line: words.title(line.row))),
    "MaxRSS": (10, Field("MaxRSS", _empty)),
    "MaxVMSize": (10, Field("MaxVMSize", _empty)),
    "NCPUS": (10, Field("NCPUS", _cpus)),
    "NNodes": (8, Field("NNodes", lambda line: str(words.node_count(line.row)))),
    "NodeList": (15, Field("NodeList", _nodes)),
    "NTasks": (8, Field("NTasks", _empty)),
    "Partition": (10, Field("Partition", lambda line: words.partitions(line.row))),
    "Priority": (10, Field("Priority", lambda line: str(request_of(line.row).priority))),
    "QOS": (10, Field("QOS", lambda line: "normal")),
    "Reason": (22, Field("Reason", lambda line: words.reason(line.row))),
    "ReqCPUS": (8, Field("ReqCPUS", _asked_cpus)),
    "ReqMem": (10, Field("ReqMem", _memory)),
    "ReqNodes": (8, Field("ReqNodes", lambda line: str(line.row.min_workers))),
    "ReqTRES": (30, Field("ReqTRES", _requested)),
    "Restarts": (8, Field("Restarts", lambda line: str(max(0, line.row.attempt - 1)))),
    "Sentence": (60, Field("Sentence", lambda line: words.sentence(line.row))),
    "Start": (19, Field("Start", lambda line: times.instant(words.started_s(line.row)))),
    "State": (10, Field("State", _state)),
    "Submit": (19, Field("Submit", lambda line: times.instant(line.row.submitted_at_s))),
    "SystemCPU": (10, Field("SystemCPU", _empty)),
    "Timelimit": (10, Field("Timelimit", _limit)),
    "TimelimitRaw": (
        12,
        Field("TimelimitRaw", lambda line: f"{(request_of(line.row).time_limit_s or 0) / 60:.0f}"),
    ),
    "TotalCPU": (10, Field("TotalCPU", _empty)),
    "UID": (6, Field("UID", _empty)),
    "User": (9, Field("User", lambda line: line.row.user)),
    "UserCPU": (10, Field("UserCPU", _empty)),
    "WCKey": (10, Field("WCKey", _empty)),
    "WorkDir": (20, Field("WorkDir", lambda line: request_of(line.row).workdir)),
}
"""Width and field by name; a width below 0 is filled on the right. What Aryl does not measure is
empty, as Slurm leaves it without a plugin."""


def run(arguments: list[str], place: Place) -> int:
    """List jobs."""
    given, others = cell.options_of(arguments, TABLE)
    given = [("account" if name == "accounts" else name, value) for name, value in given]
    options = dict(given)
    if cell.is_about_itself(options, HELP):
        return 0
    if "helpformat" in options:
        put(" ".join(FIELDS))
        return 0
    if others:
        raise cell.stray(others)
    pieces = _pieces(options)
    target = place.target()
    if options.get("clusters", "all") not in ("all", target.cell):
        raise OptionError(f"--clusters: {options['clusters']!r}, expected all or {target.cell}")
    if not {"allusers", "user", "uid", "jobs"} & set(options):
        given.append(("me", ""))
    choice = Choice(given, user=target.user, live_only=False, state=words.accounted)
    span = _span(options, place)

    async def work(client: Client) -> list[JobRow]:
        rows = await cell.listed(client, live_only=False)
        found = cell.of_tasks(rows, live_only=False)
        if not choice.are_all_known(rows):
            known = {row.job_id for row in rows}
            numbers, user = choice.asked_numbers(), choice.one_user()
            found += await past.forgotten(client, known, numbers=numbers, span=span, user=user)
        return sorted(found, key=_order)

    asks_then = {"starttime", "endtime"} & options.keys() and "RUNNING" in choice.states

    def is_meant(row: JobRow) -> bool:
        if asks_then and _ran_within(row, span):
            return choice.passes(row, of_any_state=True)
        is_other = not asks_then or words.accounted(row) != "RUNNING"
        return is_other and choice.passes(row) and _is_within(row, span)

    rows = [row for row in place.run(work) if is_meant(row)]
    lines = [Line(row, place.now_s()) for row in rows]
    _put(pieces, lines, options)
    return 0


def _pieces(options: Mapping[str, str]) -> list[Piece[Line]]:
    """The fields of the output.

    Raises:
        OptionError: a field that does not exist.
    """
    default = LONG if "long" in options else BRIEF if "brief" in options else DEFAULT
    by_name = {name.lower(): found for name, found in FIELDS.items()}
    pieces: list[Piece[Line]] = []
    for part in (options.get("format") or default).split(","):
        name, _, size = part.strip().partition("%")
        found = by_name.get(name.lower())
        if found is None or (not size.removeprefix("-").isdecimal() and size):
            raise OptionError(f"Invalid field requested: {part!r}; --helpformat lists the fields")
        width = int(size) if size else found[0]
        pieces.append(Piece(found[1], "", abs(width), width > 0))
    return pieces


def _span(options: Mapping[str, str], place: Place) -> tuple[float, float]:
    """The time in which a job was there; without any option that of today, or all with jobs named.

    Raises:
        OptionError: an instant that is in none of Slurm's forms.
    """
    now_s = place.now_s()
    default = "1970-01-02" if "jobs" in options else "today"
    try:
        begin_s = times.at_s(options.get("starttime", default), now_s=now_s)
        end_s = times.at_s(options.get("endtime", "now"), now_s=now_s)
    except ValueError as error:
        raise OptionError(f"--starttime, --endtime: {error}") from None
    if "starttime" in options and begin_s > end_s:
        begun, ended = times.instant(begin_s), times.instant(end_s)
        raise OptionError(f"--starttime {begun} is after --endtime {ended}")
    return begin_s, end_s


def _order(row: JobRow) -> tuple[int, int]:
    """Jobs in the order of their numbers; those of an array stand together: the tasks that wait,
    then the others by index.
    """
    shown = number_of(row)
    number = main_number(shown)
    index = None if row.state == JobState.PENDING else _FIRST_INDEX.search(shown)
    return int(number) if number.isdecimal() else 0, int(index[1]) if index else -1


def _is_within(row: JobRow, span: tuple[float, float]) -> bool:
    """Whether a job waited or ran within the span."""
    begin_s, end_s = span
    is_over_before = row.finished_at_s is not None and row.finished_at_s < begin_s
    return not is_over_before and row.submitted_at_s <= end_s + 1.0


def _ran_within(row: JobRow, span: tuple[float, float]) -> bool:
    """Whether a job ran within the span; it may have ended since."""
    begin_s, end_s = span
    if row.started_at_s is None or row.started_at_s > end_s + 1.0:
        return False
    return row.finished_at_s is None or row.finished_at_s >= begin_s


def _put(pieces: list[Piece[Line]], lines: list[Line], options: Mapping[str, str]) -> None:
    has_heading = "noheader" not in options
    if "parsable" not in options and "parsable2" not in options:
        for text in table(pieces, lines, has_heading=has_heading):
            put(text)
        return
    mark = options.get("delimiter", "|")
    end = mark if "parsable" in options and "parsable2" not in options else ""
    if has_heading:
        put(mark.join(piece.field.heading for piece in pieces) + end)
    for line in lines:
        put(mark.join(piece.field.text(line) for piece in pieces) + end)
