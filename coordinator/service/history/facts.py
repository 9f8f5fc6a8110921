"""What a line of the history is found by, and what it adds to a usage report. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from enum import StrEnum

from msgspec import Struct, structs

from common.history import (
    AttemptRecord,
    HistoryLine,
    JobRecord,
    LentRecord,
    LoanRecord,
    LossRecord,
    OrderRecord,
    StoryKind,
    Use,
    WaitRecord,
)

COMMON = frozenset({StoryKind.EVENT, StoryKind.DECISION})
"""Kinds that most lines are of. Lines of another kind are found by kind and word at once."""


class FactKind(StrEnum):
    """What an amount of a report is."""

    HELD = "held"  # GPUs that a job held
    LENT = "lent"  # GPUs of nodes on loan, held or not
    LOST = "lost"  # work that was lost
    WAITED = "waited"  # a job in the queue


class Fact(Struct, frozen=True, kw_only=True):
    """One amount, of an interval or, where both ends are one instant, of an instant.

    gpus: GPUs of an interval. gpu_s: GPU-seconds of an instant.
    """

    kind: FactKind
    began_s: float
    ended_s: float
    gpus: float = 0.0
    gpu_s: float = 0.0
    tenant: str = ""
    user: str = ""
    job: str = ""
    service: str = ""
    node: str = ""
    gpu_type: str = ""
    pool: str = ""
    cause: str = ""


FACT_FIELDS = Fact.__struct_fields__


DAY_S = 86_400.0


def by_day(fact: Fact) -> Iterator[tuple[int, Fact]]:
    """An amount in parts of single days of UTC, each with its day since 1970."""
    day = int(fact.began_s // DAY_S)
    if fact.ended_s <= (day + 1) * DAY_S:
        yield day, fact
        return
    began_s = fact.began_s
    while began_s < fact.ended_s:
        end_s = min(fact.ended_s, (day + 1) * DAY_S)
        yield day, structs.replace(fact, began_s=began_s, ended_s=end_s)
        began_s, day = end_s, day + 1


def about(name: str) -> str:
    """The word of all lines about a job, node, service or loan."""
    return f"about/{name}"


def of_tenant(name: str) -> str:
    """The word of all lines of a tenant's jobs and orders."""
    return f"tenant/{name}"


def of_user(name: str) -> str:
    """The word of all lines of a person's jobs and orders."""
    return f"user/{name}"


def of_kind(kind: StoryKind, whose: str = "") -> str:
    """The word of all lines of a kind that is not common; with a tenant's or person's word, of
    these alone."""
    return f"{kind}|{whose}"


def words(line: HistoryLine) -> list[str]:
    """The words that a line is found by, without those of its kind; each once."""
    found = [about(line.subject)]
    if line.detail is not None:
        found += [word for name in _named(line) if (word := about(name)) not in found]
    if line.tenant:
        found += (of_tenant(line.tenant), of_user(line.user))
    return found


def all_words(line: HistoryLine) -> list[str]:
    """The words of a line, with those of its kind."""
    found = words(line)
    if line.kind in COMMON:
        return found
    found.append(of_kind(line.kind))
    if line.tenant:
        found.append(of_kind(line.kind, of_tenant(line.tenant)))
        found.append(of_kind(line.kind, of_user(line.user)))
    return found


def needed(asked: Iterable[str], kind: StoryKind) -> tuple[str, ...]:
    """The words of a question, for its lines of a kind that is not common."""
    found = [of_kind(kind, word) if _is_whose(word) else word for word in asked]
    return tuple(found) if any(map(_is_whose, asked)) else (*found, of_kind(kind))


def _is_whose(word: str) -> bool:
    return word.startswith(("tenant/", "user/"))


def _named(line: HistoryLine) -> Iterator[str]:
    """Further jobs, nodes, services and loans that the record of a line names."""
    match line.detail:
        case AttemptRecord() | LentRecord():
            for use in line.detail.uses:
                yield use.node
                if use.service:
                    yield use.service
        case LossRecord() if line.detail.service:
            yield line.detail.service
        case JobRecord():
            yield from line.detail.nodes
        case LoanRecord():
            yield line.detail.service
            yield line.detail.lease_id
        case OrderRecord() if line.detail.target:
            yield line.detail.target
        case _:
            pass


def facts(line: HistoryLine) -> Iterator[Fact]:
    """The amounts of a line."""
    found = line.detail
    match found:
        case AttemptRecord():
            for use in found.uses:
                yield held(use, tenant=found.tenant, user=found.user, job=found.job_id)
        case LentRecord():
            for use in found.uses:
                yield lent(use)
        case LossRecord():
            yield Fact(
                kind=FactKind.LOST,
                began_s=line.at_s,
                ended_s=line.at_s,
                gpu_s=found.gpu_s,
                tenant=found.tenant,
                user=found.user,
                job=found.job_id,
                service=found.service,
                cause=found.cause,
            )
        case WaitRecord():
            yield waited(
                found.began_at_s,
                found.ended_at_s,
                found.gpus,
                tenant=found.tenant,
                user=found.user,
                job=found.job_id,
            )
        case JobRecord() if found.last_wait is not None:
            wait = found.last_wait
            yield waited(
                wait.began_at_s,
                wait.ended_at_s,
                found.gpus,
                tenant=found.tenant,
                user=found.user,
                job=found.job_id,
            )
        case _:
            pass


def held(use: Use, *, tenant: str, user: str, job: str) -> Fact:
    """GPUs that a job held."""
    return Fact(
        kind=FactKind.HELD,
        began_s=use.began_at_s,
        ended_s=use.ended_at_s,
        gpus=use.gpus,
        tenant=tenant,
        user=user,
        job=job,
        service=use.service,
        node=use.node,
        gpu_type=use.gpu_type,
        pool=use.pool,
    )


def lent(use: Use) -> Fact:
    """GPUs of a node that were on loan."""
    return Fact(
        kind=FactKind.LENT,
        began_s=use.began_at_s,
        ended_s=use.ended_at_s,
        gpus=use.gpus,
        service=use.service,
        node=use.node,
        gpu_type=use.gpu_type,
        pool=use.pool,
    )


def waited(began_s: float, ended_s: float, gpus: int, *, tenant: str, user: str, job: str) -> Fact:
    """A job in the queue, with the GPUs of its smallest gang."""
    return Fact(
        kind=FactKind.WAITED,
        began_s=began_s,
        ended_s=ended_s,
        gpus=float(gpus),
        tenant=tenant,
        user=user,
        job=job,
    )
