"""Names for shell completion. It never prints or raises, because the shell would show it."""

from __future__ import annotations

from collections.abc import Awaitable, Callable

from common.api import Jobs, ListJobs, ListLoans, ListNodes, ListServices, Loans, Nodes, Services
from common.errors import ArylError
from coordinator.cli.session import Session, Surroundings
from coordinator.client import Client

TIMEOUT_S = 1.0

Names = Callable[[Client], Awaitable[list[str]]]


async def _jobs(client: Client) -> list[str]:
    return [row.job_id for row in (await client.ask(ListJobs(is_live_only=True), Jobs)).rows]


async def _nodes(client: Client) -> list[str]:
    return [row.node for row in (await client.ask(ListNodes(), Nodes)).rows]


async def _services(client: Client) -> list[str]:
    return [row.service for row in (await client.ask(ListServices(), Services)).rows]


async def _loans(client: Client) -> list[str]:
    return [row.lease_id for row in (await client.ask(ListLoans(), Loans)).rows]


async def _subjects(client: Client) -> list[str]:
    return [
        name for of_kind in (_jobs, _nodes, _services, _loans) for name in await of_kind(client)
    ]


def matches(around: Surroundings, names: Names, incomplete: str) -> list[str]:
    """The names that begin like this; none when no cell answers.

    The options before the command are not known while the shell completes, so this looks where
    the environment, the configuration file and this machine say.
    """
    try:
        found = Session(around, timeout_s=TIMEOUT_S).run(names)
    except ArylError:
        return []
    return [name for name in found if name.startswith(incomplete)]


def complete_jobs(incomplete: str) -> list[str]:
    """Ids of live jobs."""
    return matches(Surroundings.real(), _jobs, incomplete)


def complete_nodes(incomplete: str) -> list[str]:
    """Names of nodes."""
    return matches(Surroundings.real(), _nodes, incomplete)


def complete_services(incomplete: str) -> list[str]:
    """Names of services."""
    return matches(Surroundings.real(), _services, incomplete)


def complete_loans(incomplete: str) -> list[str]:
    """Ids of live loans."""
    return matches(Surroundings.real(), _loans, incomplete)


def complete_subjects(incomplete: str) -> list[str]:
    """All of these."""
    return matches(Surroundings.real(), _subjects, incomplete)
