"""`aryl tenant`: what each tenant is guaranteed, uses, borrows and is owed."""

from __future__ import annotations

import typer

from common.api import ListTenants, Tenants
from coordinator.cli import columns
from coordinator.cli.shared import add_list

app = typer.Typer(no_args_is_help=True, help="List tenants, their guarantees and borrowing.")


@app.callback()
def _group() -> None:
    """Keep `list` a command of its own while it is the only one."""


add_list(
    app,
    "tenants",
    lambda here: here.ask(ListTenants(), Tenants).rows,
    columns=columns.tenants,
    name=lambda row: row.tenant,
    about="List all tenants with guarantee, use, borrowed GPUs and fair share.",
)
