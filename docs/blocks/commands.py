"""The commands of `aryl` as Markdown, from the app that runs them. Must not know what they do."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from functools import cache
from typing import Any

from blocks.source import one_line
from common.api import ApiErrorCode
from coordinator.cli import session
from coordinator.cli.app import whole
from coordinator.cli.interrupt import EXIT_TERMINATED
from coordinator.cli.operate import DECLINED
from coordinator.cli.plan import EXIT_CHANGES
from coordinator.client import EXIT_CODES

PROGRAM = "aryl"
_NAMES = ("Id, number or name.", "Id or name.", "Ids or names; all or none.")
"""Of arguments; the page has it once."""
_ELSEWHERE = {
    "aryl simulate": "Its options are on the page [simulation](simulate.md#what-goes-in)."
}
"""Commands whose options another page explains, each of them."""
# Typer adds them to the root itself; they are about a shell, not about a cell.
_SHELL_OPTIONS = frozenset({"install_completion", "show_completion"})
_MANY = 3
"""An option that this many commands have alike is described once."""


def command_reference() -> str:
    """Every command with its arguments and options, in the order of the help texts."""
    root = _root()
    sections = [_section(PROGRAM, root, root.help)]
    shared = "\n".join(f"- {line}" for line in _shared_options().values())
    sections.append(f"Options of many commands, named below where a command has them:\n\n{shared}")
    sections += [_section(path, command, command.help) for path, command in _walk(root, PROGRAM)]
    return "\n\n".join(sections)


def exit_code_table() -> str:
    """Every exit status that the command itself gives."""
    names = {
        0: "done",
        session.EXIT_ERROR: "any other error; also a question that was answered with no, and "
        "a plan (`aryl plan`, `--dry-run`) by which something would change",
        session.EXIT_INTERRUPTED: "interrupted by Ctrl-C",
        EXIT_TERMINATED: "ended by SIGTERM: `simulate`, with all processes that computed for it",
        session.EXIT_UNREACHABLE: "no NATS server that can be trusted answers, or no "
        "coordinator leads",
        session.EXIT_TIMEOUT: "asked, but not answered in time; what was asked may still happen",
    }
    meanings = {
        ApiErrorCode.USAGE: "a wrong option, file or value, or no cell is named and none runs "
        "here; nothing was changed",
        ApiErrorCode.NOT_FOUND: "there is no such job, node, service or loan",
        ApiErrorCode.CONFLICT: "it cannot be done now; the text names the obstacle",
        ApiErrorCode.DENIED: "you may not: the coordinator refuses it, or NATS the user, the "
        "password or the subject",
    }
    assert DECLINED == EXIT_CHANGES == session.EXIT_ERROR, "one row stands for all"
    names |= {EXIT_CODES[code]: meaning for code, meaning in meanings.items()}
    lines = ["| exit code | meaning |", "|---|---|"]
    return "\n".join(lines + [f"| {code} | {names[code]} |" for code in sorted(names)])


@cache
def _root() -> Any:
    """The command with all its subcommands, also those that it would load late."""
    return whole()


def _walk(group: Any, path: str) -> Iterator[tuple[str, Any]]:
    for name, command in group.commands.items():
        here = f"{path} {name}"
        if hasattr(command, "commands"):
            yield from _walk(command, here)
        else:
            yield here, command


def _section(path: str, command: Any, help_text: str | None) -> str:
    arguments = [one for one in command.params if one.param_type_name == "argument"]
    options = _options(command)
    shared = _shared_options()
    words = [_argument(one) for one in arguments]
    if path == PROGRAM:
        words = ["COMMAND"]
    usage = " ".join([path, *(["[OPTIONS]"] if options else []), *words])
    is_shown = any(each.name not in shared for each in options) or len(words) > 1
    heading = f"### {path}" if is_shown or not words else f"### {path} {' '.join(words)}"
    parts = [heading, f"    {usage}" if words and is_shown else "", _prose(help_text or "")]
    lines = [
        f"- `{_argument(one)}`: {one_line(one.help or '')}"
        for one in arguments
        if one.help not in _NAMES
    ]
    lines += [f"- {line}" for one in options if (line := _option(one)) != shared.get(one.name)]
    if path in _ELSEWHERE:
        return "\n\n".join(part for part in (*parts, _ELSEWHERE[path]) if part)
    parts.append("\n".join(lines))
    if also := [f"`{one.opts[0]}`" for one in options if _option(one) == shared.get(one.name)]:
        parts.append(f"Also {', '.join(also)}.")
    if path != PROGRAM and command.epilog:
        parts.append(_prose(command.epilog))
    return "\n\n".join(part for part in parts if part)


def _options(command: Any) -> list[Any]:
    return [
        one
        for one in command.params
        if one.param_type_name == "option" and one.name not in _SHELL_OPTIONS
    ]


@cache
def _shared_options() -> dict[str, str]:
    """Options that many commands have alike, by name: how they are written."""
    root = _root()
    found = Counter(
        (one.name, _option(one)) for _, command in _walk(root, PROGRAM) for one in _options(command)
    )
    return {name: line for (name, line), count in found.items() if count >= _MANY}


def _prose(text: str) -> str:
    return "\n\n".join(one_line(part) for part in text.replace("\b", "").split("\n\n"))


def _argument(argument: Any) -> str:
    return " ".join(argument.get_usage_pieces(_context()))


def _option(option: Any) -> str:
    flags = ", ".join(f"`{flag}`" for flag in [*option.opts, *option.secondary_opts])
    kind = "" if option.is_flag else f" `{_kind(option)}`"
    default = option.default
    shown = "" if default in (None, False, "", [], ()) else f" (`{default}`)"
    return f"{flags}{kind}{shown}: {one_line(option.help or '')}"


def _kind(option: Any) -> str:
    """What stands after the flag in a help text."""
    return str(option.display_type(_context()))


@cache
def _context() -> Any:
    """Made once: Typer reads every function of the app anew for each of its commands."""
    root = _root()
    return root.make_context(PROGRAM, ["status"])
