"""`sbatch`: submit a batch script."""

from __future__ import annotations

import contextlib
import socket
import sys
import uuid
from collections.abc import Iterable, Sequence
from pathlib import Path

from common.api import JobRow, Submit, Submitted
from common.errors import ConfigError, Unavailable
from common.jobspec import MAX_SPEC_BYTES, parse
from common.model import JobSpec, JobState
from common.slurm.options import Kind, Option, OptionError, read
from coordinator.cli.slurm import cell, expected_start, node_options, script, words
from coordinator.cli.slurm.cell import Place, note, put
from coordinator.cli.slurm.request import Submitter, request
from coordinator.cli.slurm.sbatch_options import FROM_ENVIRONMENT, TABLE
from coordinator.client import Client

SUBMIT_ATTEMPTS = 3
STDIN = ("-", "/dev/stdin")
HELP = """usage: sbatch [OPTION...] SCRIPT [ARGUMENT...]
       sbatch [OPTION...] --wrap COMMAND

Submit a batch script; without one it is read from standard input. Options are Slurm's, as flags or
in lines #SBATCH of the script; flags win. docs/slurm.md lists them.

  sbatch --gpus=2 --time=1:00:00 train.sh
"""


def run(arguments: list[str], place: Place) -> int:
    """Submit; 0, or with --wait the exit code of the job. With --test-only nothing is submitted,
    and 1 says that the job could never start.
    """
    flags, rest = read(arguments, TABLE)
    given = {option.name for option, _ in flags}
    if cell.is_about_itself(given, HELP):
        return 0
    wrap = next((value for option, value in flags if option.name == "wrap"), None)
    found, name, others = _script(wrap, rest, place)
    options = asked(found, flags, place)
    tenant = options.get("account") or None
    return place.run(
        lambda client: _submit(client, place, found, others, name, options), tenant=tenant
    )


def _script(
    wrap: str | None, rest: Sequence[str], place: Place
) -> tuple[script.Script, str, list[str]]:
    """The script, the name of a job without one, and the script's arguments."""
    if wrap is not None:
        if rest:
            raise ConfigError("Script arguments not permitted with --wrap option")
        return script.wrapped(wrap), "wrap", []
    if not rest or rest[0] in STDIN:
        return script.parsed(sys.stdin.read()), "sbatch", list(rest[1:])
    path = Path(rest[0])
    try:
        text = path.read_text()
    except OSError as error:
        raise ConfigError(f"Unable to open file {rest[0]}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise ConfigError(f"{rest[0]} is not text in UTF-8") from None
    return script.parsed(text), path.name, list(rest[1:])


def asked(
    found: script.Script, flags: Iterable[tuple[Option, str]], place: Place
) -> dict[str, str]:
    """The options by name: those of the script, of the environment, and of the command line.

    Raises:
        ConfigError: an option that is refused; names it, and its line in the script.
    """
    options: dict[str, str] = {}
    for number, line in found.lines:
        where = f"line {number} of the script"
        try:
            of_line, others = read(line, TABLE, mixed=True)
            _take(options, of_line, place.command)
        except OptionError as error:
            raise ConfigError(f"{where}: {error}") from None
        if others:
            raise ConfigError(f"{where}: {others[0]!r} is no option")
    for variable, name in FROM_ENVIRONMENT.items():
        if place.environ.get(variable):
            options[name] = place.environ[variable]
    _take(options, flags, place.command)
    if options.get("input", "/dev/null") not in ("/dev/null", "none"):
        raise ConfigError("--input is not supported: redirect standard input in the script")
    return options


def _take(options: dict[str, str], found: Iterable[tuple[Option, str]], command: str) -> None:
    for option, value in found:
        if option.kind == Kind.REFUSED:
            raise OptionError(f"--{option.name} is not supported: {option.why}")
        if option.kind == Kind.HARMLESS:
            if option.why and value.upper() != "NONE":
                note(command, f"note: --{option.name} changes nothing: {option.why}")
            continue
        options[option.name] = value


async def made(
    client: Client,
    place: Place,
    found: script.Script,
    arguments: Sequence[str],
    options: dict[str, str],
    *,
    name: str,
) -> JobSpec:
    """The job of a script, with notes for its user on stderr.

    Raises:
        ConfigError: an option that does not fit, or a job that is too large.
    """
    target = place.target(tenant=options.get("account") or None)
    names_nodes = bool(options.get("nodelist") or options.get("exclude"))
    nodes = await cell.nodes(client) if names_nodes or _names_type(options) else []
    by = Submitter(
        user=target.user,
        tenant=target.tenant,
        cell=target.cell,
        host=socket.gethostname(),
        directory=_here(place),
        environ=place.environ,
        gpu_types=tuple(sorted({kind for row in nodes for kind in words.node_types(row)})),
        job_ids=await _job_ids(client, options.get("dependency", "")),
    )
    wanted = request(found.text, arguments, options, by, name=name)
    if "quiet" not in options:
        unknown = node_options.unknown(options, {row.node for row in nodes})
        for text in (*wanted.notes, *unknown):
            note(place.command, f"note: {text}")
    try:
        return parse(wanted.values, source="batch script")
    except ConfigError as error:
        if str(MAX_SPEC_BYTES) not in str(error):
            raise
        raise ConfigError(f"{error}; --export=NAME,... exports fewer variables") from None


async def _submit(
    client: Client,
    place: Place,
    found: script.Script,
    arguments: list[str],
    name: str,
    options: dict[str, str],
) -> int:
    spec = await made(client, place, found, arguments, options, name=name)
    if "test-only" in options:
        return await expected_start.run(client, spec, options, place.now_s())
    answer = await submitted(client, spec)
    for warning in answer.warnings:
        note("sbatch", f"warning: {warning}")
    row = (await cell.described(client, answer.job_id)).job
    assert row is not None, "a job's description has its row"
    if "parsable" in options:
        put(str(row.number))
    elif "quiet" not in options:
        put(f"Submitted batch job {row.number}")
    sys.stdout.flush()
    if "wait" not in options:
        return 0
    return exit_code(await cell.until_ended(client, place.clock, answer.job_id))


def _here(place: Place) -> str:
    """The current directory, with the links through which the shell came here."""
    shown = place.environ.get("PWD", "")
    with contextlib.suppress(OSError):
        if shown.startswith("/") and Path(shown).samefile("."):
            return shown
    return str(Path.cwd())


def _names_type(options: dict[str, str]) -> bool:
    """Whether the types of the cell's GPUs have to be known."""
    wanted = [options.get(name, "") for name in ("gpus", "gpus-per-node", "gpus-per-task")]
    has_kind = any(not text.isdecimal() for text in wanted if text)
    return bool(options.get("partition") or options.get("gres") or has_kind)


async def _job_ids(client: Client, dependency: str) -> dict[str, str]:
    """The ids of the jobs that a dependency names by their numbers."""
    numbers = [part for one in dependency.split(",") for part in one.split(":")[1:]]
    found: dict[str, str] = {}
    for number in dict.fromkeys(numbers):
        found[number] = (await cell.described(client, number)).name
    return found


async def submitted(client: Client, spec: JobSpec) -> Submitted:
    """Submit to the cell. A lost answer is asked for again: same request, same job."""
    wanted = Submit(spec=spec, request_id=uuid.uuid4().hex)
    for attempt in range(1, SUBMIT_ATTEMPTS + 1):
        try:
            return await client.ask(wanted, Submitted)
        except Unavailable:
            if attempt == SUBMIT_ATTEMPTS:
                raise
    raise AssertionError("the last attempt returns or raises")


def exit_code(row: JobRow) -> int:
    """The exit code of a job that ended, as a shell would have it."""
    code = row.exit_code or 0
    if code < 0:
        return 128 - code
    return code if code or row.state == JobState.SUCCEEDED else 1
