"""`scancel`: end jobs."""

from __future__ import annotations

from common.api import ApiErrorCode, Cancel, Done, JobRow
from common.slurm.options import FLAG, Kind, Option, OptionError
from coordinator.cli.slurm import cell
from coordinator.cli.slurm.cell import Place, note, number_of
from coordinator.cli.slurm.choosing import Choice, main_number
from coordinator.client import ApiRefused, Client

_NO_SIGNAL = "Aryl sends a job one signal, as it has to leave (sbatch --signal)"

TABLE = (
    Option("user", "u"),
    Option("me", "", FLAG),
    Option("name", "n"),
    Option("jobname", ""),
    Option("state", "t"),
    Option("account", "A"),
    Option("partition", "p"),
    Option("signal", "s"),
    Option("quiet", "Q", FLAG),
    Option("verbose", "v", FLAG),
    Option("version", "V", FLAG),
    Option("help", "", FLAG),
    Option("usage", "", FLAG),
    Option("full", "f", FLAG, Kind.HARMLESS),
    Option("hurry", "H", FLAG, Kind.HARMLESS),
    Option("ctld", "", FLAG, Kind.HARMLESS),
    Option("interactive", "i", FLAG, Kind.REFUSED, "name the jobs"),
    Option("batch", "b", FLAG, Kind.REFUSED, _NO_SIGNAL),
    Option("nodelist", "w", kind=Kind.REFUSED, why="name the jobs"),
    Option("qos", "q", kind=Kind.REFUSED, why="a tenant has the limits"),
    Option("reservation", "R", kind=Kind.REFUSED, why="Aryl keeps no reservations"),
    Option("wckey", "", kind=Kind.REFUSED, why="Aryl keeps no keys of that kind"),
    Option("clusters", "M", kind=Kind.REFUSED, why="a command talks to one cell: set ARYL_CELL"),
    Option("sibling", "", kind=Kind.REFUSED, why="a command talks to one cell: set ARYL_CELL"),
)
ENDING = ("KILL", "9", "TERM", "15")
FILTERS = frozenset({"user", "me", "name", "state", "account", "partition"})
HELP = """usage: scancel [OPTION...] [JOB...]

End jobs by number, or all that the options choose. A job gets SIGTERM and its grace first.

  scancel 17        scancel --me --state=PENDING
"""


def run(arguments: list[str], place: Place) -> int:
    """Cancel jobs; 1 if one of those that are named cannot be cancelled."""
    given, names = cell.options_of(arguments, TABLE)
    given = [("name" if name == "jobname" else name, value) for name, value in given]
    options = dict(given)
    if cell.is_about_itself(options, HELP):
        return 0
    signal = options.get("signal", "TERM").upper().removeprefix("SIG")
    if signal not in ENDING:
        raise OptionError(f"--signal={options['signal']} is not supported: {_NO_SIGNAL}")
    names = [part for name in names for part in name.split(",") if part] if names else []
    if not names and not FILTERS & set(options):
        raise OptionError("No job identification provided")
    choice = Choice(given, user=place.target().user, live_only=True)
    is_quiet = "quiet" in options

    async def work(client: Client) -> int:
        if FILTERS & set(options):
            rows = [row for row in await cell.jobs(client, live_only=True) if choice.passes(row)]
            wanted = {main_number(name) for name in names}
            rows = [row for row in rows if not names or main_number(number_of(row)) in wanted]
            failures = [await _end(client, number_of(row), _meant(row), is_quiet) for row in rows]
        else:
            failures = [await _end(client, name, name, is_quiet) for name in names]
        return 1 if any(failures) else 0

    return place.run(work)


def _meant(row: JobRow) -> str:
    """What a row stands for: a job, or the tasks of an array that wait."""
    tasks = cell.tasks_of(row)
    return f"{row.job_id}_[{tasks}]" if tasks else row.job_id


async def _end(client: Client, shown: str, name: str, is_quiet: bool) -> bool:
    """End a job, an array or some of its tasks; whether that failed. An end before is no failure.

    shown: its name in messages.
    """
    try:
        await client.ask(Cancel(job_id=name), Done)
    except ApiRefused as refused:
        if refused.error.code == ApiErrorCode.CONFLICT:
            return False  # it has ended meanwhile
        why = refused.error.message
        if refused.error.code == ApiErrorCode.NOT_FOUND:
            why = "Invalid job id specified"
        if not is_quiet or refused.error.code == ApiErrorCode.NOT_FOUND:
            note("scancel", f"error: Kill job error on job id {shown}: {why}")
        return True
    return False
