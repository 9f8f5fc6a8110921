"""`aryl audit`: the orders of people, accepted and refused."""

from __future__ import annotations

from typing import Annotated

import typer

from common.api import GetHistory
from coordinator.cli.history import (
    AUDIT_KINDS,
    LimitOption,
    TenantOption,
    UserOption,
    order_columns,
    show_lines,
)
from coordinator.cli.output import Format, NoHeadersOption, OutputOption, QuietOption, Show
from coordinator.cli.session import session
from coordinator.cli.time_range import SinceOption, UntilOption, instant_of


def register(app: typer.Typer) -> None:
    """Add the command."""
    app.command("audit")(audit)


def audit(
    ctx: typer.Context,
    target: Annotated[
        str, typer.Option(metavar="NAME", help="Only orders for this job, node or service.")
    ] = "",
    tenant: TenantOption = "",
    user: UserOption = "",
    since: SinceOption = "",
    until: UntilOption = "",
    limit: LimitOption = 100,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """Show who ordered what, when, from where, and whether it was refused; newest last.

    FROM is what the caller states about itself: the host and the version of its aryl. WHO is
    certain where NATS gives each person rights of their own. Refused orders are recorded up to
    refused_orders_per_s of each tenant.

    Example: aryl audit --user ada --since 7d
    """
    here = session(ctx)
    now_s = here.clock.wall_s()
    asked = GetHistory(
        names=(target,) if target else (),
        tenant=tenant,
        user=user,
        kinds=AUDIT_KINDS,
        since_at_s=instant_of(since, now_s=now_s, field="since"),
        until_at_s=instant_of(until, now_s=now_s, field="until"),
    )
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    show_lines(here, show, asked, limit=limit, columns=order_columns())
