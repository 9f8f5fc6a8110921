"""An operator's order: show what it affects, confirm, and send it.

An order that stops jobs shows them first. It asks on a terminal, and otherwise needs --yes. The
same holds for an order that rests on the operator's word alone.
"""

from __future__ import annotations

import sys
from collections.abc import Awaitable, Callable, Iterable
from functools import partial
from typing import Annotated

import typer
from msgspec import UNSET

from common.api import OPERATORS, ApiError, ApiErrorCode, Done, Jobs, ListJobs, Operate
from common.errors import ArylError, ConfigError
from coordinator.cli.describe import Hit, hit_line, hits
from coordinator.cli.output import Format, put_json
from coordinator.cli.session import Session, say
from coordinator.cli.window import Window
from coordinator.client import ApiRefused, Client
from coordinator.engine.state.events import OperatorAction
from coordinator.policies.contract.text import counted

YesOption = Annotated[bool, typer.Option("--yes", "-y", help="Do not ask for confirmation.")]
ReasonOption = Annotated[
    str, typer.Option(metavar="TEXT", help="Reason shown in events and to the affected users.")
]

DECLINED = 1


def order(
    session: Session,
    action: OperatorAction,
    *,
    target: str = "",
    value: str = "",
    reason: str = "",
    output: Format = Format.TABLE,
) -> None:
    """Give one order and say that it is in the journal; errors as `Client.ask`."""
    request = Operate(action=action, target=target, value=value, reason=reason)
    answer = session.ask(request, Done)
    done(Done(detail=f"{answer.detail} {value}".strip()), output)


def done(answer: Done, output: Format) -> None:
    """Print the order that was given."""
    if output == Format.JSON:
        put_json({"detail": answer.detail})
    else:
        for line in answer.detail.splitlines() or [""]:
            verb, _, rest = line.partition(" ")
            say(f"ordered: {verb.replace('_', ' ')} {rest}".rstrip())


def order_against_jobs(
    session: Session,
    action: OperatorAction,
    *,
    find: Callable[[Client], Awaitable[tuple[tuple[str, ...], set[str]]]],
    what: str,
    reason: str,
    is_yes: bool,
    output: Format,
    deadline_s: float | None = None,
    window: Window | None = None,
    promise: str = "",
) -> tuple[str, ...]:
    """Show the jobs that an order affects, ask if there are any, then give it; returns its targets.

    Args:
        find: the order's targets, and the nodes that it takes from jobs.
        what: the order in words, as a question needs it.
        deadline_s: how long the jobs may go on; None: not at all.
        window: the nodes are taken later, and jobs that are over by then are not affected; None: at
            once.
        promise: what an operator confirms with this order and only the operator can know. It is
            shown before the question, and then an order that affects no job is confirmed, too.

    Raises:
        ConfigError: no terminal to ask on and `is_yes` is not set; nothing was sent.
        ApiRefused: there is no such target, or it cannot be done now.
    """

    async def look(client: Client) -> tuple[tuple[str, ...], list[Hit]]:
        if not client.is_operator:  # before it shows or asks anything
            why = f"only tenant {OPERATORS} may do this"
            raise ApiRefused(ApiError(code=ApiErrorCode.DENIED, message=why, field="tenant"))
        targets, nodes = await find(client)
        in_full = window is not None
        jobs = (await client.ask(ListJobs(is_live_only=True, in_full=in_full), Jobs)).rows
        found = hits(jobs if window is None else tuple(filter(window.hits, jobs)), nodes)
        if targets:
            show_hits(found, what, by_then=window is not None)
        return targets, found

    def request(target: str) -> Operate:
        in_s = UNSET if window is None else window.in_s(session.clock.wall_s())
        return Operate(
            action=action, target=target, reason=reason, deadline_s=deadline_s, in_s=in_s
        )

    targets, found = session.run(look)
    if not targets:
        if output == Format.JSON:
            put_json({"detail": ""})
        return ()
    if promise:
        say(promise)
    if found or promise:
        confirm(session, what, is_yes=is_yes)
    done(session.run(partial(give, requests=map(request, targets))), output)
    return targets


async def give(client: Client, requests: Iterable[Operate]) -> Done:
    """Give orders one after the other; where one fails, those before it are named on stderr."""
    given: list[str] = []
    for request in requests:
        try:
            given.append((await client.ask(request, Done)).detail)
        except ArylError:
            if given:
                say(f"ordered before this failed: {'; '.join(given)}")
            raise
    return Done(detail="\n".join(given))


def show_hits(found: list[Hit], what: str, *, by_then: bool = False) -> None:
    """Which jobs an order stops or shrinks, on stderr.

    by_then: it does so later; jobs that are over by then are not among them.
    """
    if not found:
        beyond = " beyond that" if by_then else ""
        say(f"{what}: no job runs there{beyond}")
        return
    say(f"{what} hits {counted(len(found), 'job')}:")
    for hit in found:
        say(hit_line(hit))


def confirm(session: Session, what: str, *, is_yes: bool) -> None:
    """Return on a yes; otherwise exit with nothing changed.

    Raises:
        ConfigError: no terminal to ask on.
        typer.Exit: the answer was no.
    """
    if is_yes:
        return
    if not session.is_interactive():
        raise ConfigError(f"{what}: cannot ask for confirmation here; add --yes to confirm")
    # Not typer's own question: it writes a blank to standard output, which is for data.
    typer.echo(f"{what}? [y/N] ", err=True, nl=False)
    if sys.stdin.readline().strip().lower() not in ("y", "yes"):
        say("nothing was changed")
        raise typer.Exit(DECLINED)
