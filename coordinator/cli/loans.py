"""`aryl loan`: list loans, and end them early."""

from __future__ import annotations

from contextlib import suppress
from typing import Annotated

import typer

from common.api import ApiError, ApiErrorCode, Describe, Description, ListLoans, LoanRow, Loans
from coordinator import plain_text
from coordinator.cli import columns
from coordinator.cli.complete import complete_loans
from coordinator.cli.operate import ReasonOption, YesOption, order_against_jobs
from coordinator.cli.output import (
    Format,
    NoHeadersOption,
    OutputOption,
    QuietOption,
    Show,
    put_rows,
)
from coordinator.cli.session import session
from coordinator.cli.shared import add_describe, add_explain, add_order
from coordinator.client import ApiRefused, Client
from coordinator.engine.state.events import OperatorAction

app = typer.Typer(no_args_is_help=True, help="List loans and their cost, and revoke them.")

LoanArgument = Annotated[
    str,
    typer.Argument(
        metavar="LOAN",
        help="Id of the loan, or name of the lent node.",
        autocompletion=complete_loans,
    ),
]


@app.command("list")
def list_(
    ctx: typer.Context,
    is_all: Annotated[bool, typer.Option("--all", "-a", help="List ended loans too.")] = False,
    output: OutputOption = Format.TABLE,
    no_headers: NoHeadersOption = False,
    quiet: QuietOption = False,
) -> None:
    """List loans, oldest first; ended ones only with --all."""
    here = session(ctx)
    rows = here.ask(ListLoans(is_live_only=not is_all), Loans).rows
    show = Show(output=output, has_headings=not no_headers, is_quiet=quiet)
    table = columns.loans(here.clock.wall_s())
    put_rows(here, show, "loans", rows, table, lambda row: row.lease_id)


add_describe(
    app,
    "loan",
    LoanArgument,
    about="Show one loan in full: its stages, predicted and realised cost, events of its node.",
)
add_explain(app, "loan", LoanArgument, about="Explain why a loan was made, and why it ended.")
add_order(
    app,
    "approve",
    OperatorAction.APPROVE_LOAN,
    Annotated[str, typer.Argument(metavar="NODE", help="Name of the recommended node.")],
    about="Make a recommended loan (mode recommend); it returns as any other loan.",
)


@app.command("revoke")
def revoke(
    ctx: typer.Context,
    loan: LoanArgument,
    reason: ReasonOption = "",
    yes: YesOption = False,
    output: OutputOption = Format.TABLE,
) -> None:
    """Take one lent node back now; its jobs shrink or are preempted, with their grace."""

    async def find(client: Client) -> tuple[tuple[str, ...], set[str]]:
        found = await client.ask(Describe(kind="loan", name=loan), Description)
        assert found.loan is not None, "a loan's description has its row"
        if found.loan.returned_at_s is not None:
            said = await _not_lent(client, found.loan, named=loan)
            raise ApiRefused(ApiError(code=ApiErrorCode.CONFLICT, message=said, field="lease_id"))
        return (found.loan.lease_id,), {found.loan.node}

    order_against_jobs(
        session(ctx),
        OperatorAction.REVOKE_LOAN,
        find=find,
        what=f"revoking loan {loan}",
        reason=reason,
        is_yes=yes,
        output=output,
    )


async def _not_lent(client: Client, row: LoanRow, *, named: str) -> str:
    """For a loan that is over: that its node has none, and the node's present role.

    named: the caller's argument: the loan's id, or its node.
    """
    said = f"there is no loan of {row.node}"
    with suppress(ApiRefused):  # it was removed
        node = (await client.ask(Describe(kind="node", name=row.node), Description)).node
        said += f", which is {plain_text.role(node)}" if node is not None else ""
    return said if named == row.node else f"loan {row.lease_id} came home already: {said}"
