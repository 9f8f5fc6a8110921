"""The form of a policy: its hooks, its knobs and its parts.

A policy either combines rules over the shared parts, or decides jointly by the general hook. Knobs
of both are set by name: `aryl:reclaim=random:resize_cost_s=0`.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import StrEnum
from functools import partial
from math import isfinite
from re import fullmatch
from typing import Any, TypeVar, cast, get_origin

import msgspec
from msgspec import Struct

from common.errors import ConfigError
from common.model import JobId, NodeName
from coordinator.policies.aryl.blockers import beyond_the_policy
from coordinator.policies.aryl.rules import Rules
from coordinator.policies.aryl.scheduling_pass import (
    allocate,
    lend,
    not_lent_reasons,
    pending_reasons,
    size_reasons,
)
from coordinator.policies.aryl.shortest_first import submission_key
from coordinator.policies.contract import cooldown
from coordinator.policies.contract.decisions import Allocation, Decision, PendingReason
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.knobs import known, replaced, values, why_idle
from coordinator.policies.tenants import enforce as tenant_rules
from coordinator.policies.tenants import precedence

K = TypeVar("K", bound=Struct)


class Parts(Struct, frozen=True, kw_only=True):
    """Which parts a policy is made of, in a few words each; empty: it has none of that kind."""

    order: str = ""
    size: str = ""
    place: str = ""
    loan: str = ""
    reclaim: str = "server preemption cost"
    forecast: str = ""


class NoKnobs(Struct, frozen=True, kw_only=True):
    """Knobs of a policy that has none."""


def _none(*_: object) -> tuple[()]:
    return ()


Allocate = Callable[[ClusterSnapshot, bytes], Allocation]


class Policy(Struct, frozen=True, kw_only=True):
    """Scheduling passes (`allocate`), and loans and reclaims (`lend`).

    allocate: from the snapshot and the policy's memory.
    pending_reasons: the reason of each job that would not start in a pass now, by the same. Called
        only on demand, because it costs more than the pass.
    not_lent_reasons: why a serving node of a service is not lent, the service's balance first.
    standing: the standing of a job with GPUs by the policy's own measure, or why it has no more;
        empty for most policies.
    knobs: its knobs. turn: the policy by a name of its own with other knobs.
    lends: it may lend nodes. lends_on_demand: only those that a job could use.
    shares_gpus: it suspends jobs and resumes them; under any other policy they resume when they
        can.
    is_ordered: `pending_reasons` has jobs in queue order; otherwise the policy ranks all waiting
        jobs again each pass, and no job is known to be next.
    """

    name: str
    description: str
    allocate: Allocate
    lend: Callable[[ClusterSnapshot], tuple[Decision, ...]]
    pending_reasons: Callable[[ClusterSnapshot, bytes], tuple[PendingReason, ...]] = _none
    not_lent_reasons: Callable[[ClusterSnapshot, NodeName], tuple[str, ...]] = _none
    standing: Callable[[ClusterSnapshot, bytes, JobId], tuple[str, ...]] = _none
    knobs: Struct = NoKnobs()
    turn: Callable[[str, Any], Policy] | None = None
    parts: Parts = Parts()
    lends: bool = False
    lends_on_demand: bool = True
    shares_gpus: bool = False
    is_ordered: bool = True


def bundle(name: str, description: str, rules: Rules) -> Policy:
    """A policy from rules."""

    def turn(other: str, turned: Rules) -> Policy:
        return bundle(other, description, turned)

    return Policy(
        name=name,
        description=description,
        allocate=_within(partial(allocate, rules), trusts_profiles=rules.trusts_profiles),
        lend=partial(lend, rules),
        pending_reasons=partial(
            tenant_rules.held,
            partial(precedence.allocated, partial(allocate, rules)),
            partial(
                precedence.explained, partial(allocate, rules), partial(pending_reasons, rules)
            ),
            trusts_profiles=rules.trusts_profiles,
        ),
        not_lent_reasons=partial(not_lent_reasons, rules),
        standing=partial(
            tenant_rules.sized,
            partial(precedence.allocated, partial(allocate, rules)),
            partial(size_reasons, rules),
            trusts_profiles=rules.trusts_profiles,
        ),
        knobs=rules,
        turn=turn,
        parts=_parts_of(rules),
        lends=rules.lending is not None,
        lends_on_demand=rules.loans.only_on_demand,
    )


def _within(
    decide: Allocate,
    *,
    by_weight: bool = True,
    keeps_quotas: bool = False,
    trusts_profiles: bool = True,
) -> Allocate:
    """A pass within what holds for every policy: room that is kept for higher priorities, promises
    to tenants, and rest after a stop."""
    within = partial(
        tenant_rules.allocated,
        partial(precedence.allocated, decide, by_tenant=not by_weight),
        by_weight=by_weight,
        keeps_quotas=keeps_quotas,
        trusts_profiles=trusts_profiles,
    )
    return partial(cooldown.allocated, within)


def _parts_of(rules: Rules) -> Parts:
    order = rules.order.__name__.removesuffix("_key")
    loans, quantile = rules.loans, rules.loans.quantile
    last = "last value, slope, day before"
    forecast = last if quantile is None else f"seasonal quantile {quantile:g}"
    return Parts(
        order=f"{order}, {'strict' if rules.is_strict else 'with skip'}",
        size="base, then knapsack of flexible workers" if rules.scaling else "base demand",
        place="best fit, base and flexible apart" if loans.separates_groups else "best fit",
        loan="spare over forecast" if rules.lending else "",
        reclaim=str(loans.reclaim),
        forecast=forecast if rules.lending else "",
    )


Decide = Callable[[K, ClusterSnapshot, bytes], Allocation]
Explain = Callable[[K, ClusterSnapshot, bytes], tuple[PendingReason, ...]]
Standing = Callable[[K, ClusterSnapshot, bytes, JobId], tuple[str, ...]]

LENDS_NOTHING = Rules(order=submission_key)
"""It lends no node, and takes back in time what another policy has lent."""


def joint(
    name: str,
    description: str,
    *,
    knobs: K,
    allocate: Decide[K],
    pending_reasons: Explain[K],
    parts: Parts,
    shares_gpus: bool = False,
    is_ordered: bool = True,
    by_weight: bool = True,
    keeps_quotas: bool = False,
    standing: Standing[K] | None = None,
) -> Policy:
    """A policy that decides jointly who runs, by the general hook; it lends nothing.

    allocate, pending_reasons, standing: get the knobs first. A frozen cell is not put to them:
        nothing is decided.
    by_weight: tenants take turns by their weights; not where it divides by them itself, by a
        measure of its own, or has promised jobs their time.
    keeps_quotas: it reckons with them itself, and sees the jobs that its tenants have no room for.
    """

    def decide(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        if snapshot.is_frozen:
            return Allocation(decisions=(), memory=memory)
        return allocate(knobs, snapshot, memory)

    def explain(snapshot: ClusterSnapshot, memory: bytes) -> tuple[PendingReason, ...]:
        return beyond_the_policy(snapshot, pending_reasons(knobs, snapshot, memory))

    def turn(other: str, turned: K) -> Policy:
        return joint(
            other, description, knobs=turned, allocate=allocate, pending_reasons=pending_reasons,
            parts=parts, shares_gpus=shares_gpus, is_ordered=is_ordered, by_weight=by_weight,
            keeps_quotas=keeps_quotas, standing=standing,
        )  # fmt: skip

    return Policy(
        name=name,
        description=description,
        allocate=_within(decide, by_weight=by_weight, keeps_quotas=keeps_quotas),
        lend=partial(lend, LENDS_NOTHING),
        pending_reasons=partial(
            tenant_rules.held,
            partial(precedence.allocated, decide, by_tenant=not by_weight),
            partial(precedence.explained, decide, explain, by_tenant=not by_weight),
            by_weight=by_weight,
            keeps_quotas=keeps_quotas,
        ),
        not_lent_reasons=partial(not_lent_reasons, LENDS_NOTHING),
        standing=_none if standing is None else partial(standing, knobs),
        knobs=knobs,
        turn=turn,
        parts=parts,
        shares_gpus=shares_gpus,
        is_ordered=is_ordered,
    )


# --- knobs ----------------------------------------------------------------------------------


def knobs_of(made: Policy) -> dict[str, Any]:
    """The knobs of a policy and their types, also those of parts that it is without."""
    return {name: each.kind for name, each in known(type(made.knobs)).items()}


def turned(made: Policy, name: str, texts: list[str], *, is_whole: bool = True) -> Policy:
    """A policy with knobs turned, each by `KNOB=VALUE`.

    is_whole: no more are turned, so that each must decide something.

    Raises:
        ConfigError: a knob that it does not have, which lists those that it has, one that is
            turned twice, a value that is none of its (never NaN, never an infinity), or, of a whole
            name, a knob that decides nothing while another one is off.
    """
    if not texts:
        return made
    if made.turn is None or not knobs_of(made):
        raise ConfigError(f"policy: {made.name} has no knobs")
    found = [_knob(made, text) for text in texts]
    names = [key for key, _ in found]
    if twice := sorted({key for key in names if names.count(key) > 1}):
        raise ConfigError(f"policy {made.name}: {', '.join(twice)} is set twice")
    try:
        knobs = replaced(made.knobs, dict(found))
    except ConfigError as error:  # values that do not fit each other
        raise ConfigError(f"policy {made.name}: {error}") from None
    for key, text in zip(names, texts, strict=True):
        if is_whole and not is_unturned(made, text):
            refuse_idle(made, knobs, key, text)
    return made.turn(name, knobs)


def is_unturned(made: Policy, text: str) -> bool:
    """Whether `KNOB=VALUE` says a default or the policy's own value, which any name may say."""
    key, value = _knob(made, text)
    default = known(type(made.knobs))[key].default
    return value in (default, values(made.knobs).get(key, default))


def refuse_idle(made: Policy, knobs: Struct, key: str, text: str) -> None:
    """Refuse a knob that has no effect beside the others.

    Raises:
        ConfigError: names the knob that it needs.
    """
    if idle := why_idle(knobs, key):
        raise ConfigError(f"policy {made.name}: {text} decides nothing: {idle}")


def _knob(made: Policy, text: str) -> tuple[str, object]:
    key, has_value, value = text.partition("=")
    kinds = knobs_of(made)
    if key not in kinds or not has_value:
        raise ConfigError(
            f"policy {made.name}: {text!r} sets no knob; expected KNOB=VALUE with one of "
            f"{', '.join(sorted(values(made.knobs)))}"
        )
    # A list is written with slashes, as commas part policies and colons knobs.
    is_list = get_origin(kinds[key]) is tuple
    parts = (value.split("/") if value else []) if is_list else value
    try:
        found = msgspec.convert(parts, kinds[key], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(
            f"policy {made.name}: {key}={value}: {plainly(error)}"
            f"{PARTED if is_list and ',' in value else _choices(kinds[key])}"
        ) from None
    if not _is_finite(found):
        raise ConfigError(f"policy {made.name}: {key}={value}: expected a finite number")
    return key, found


PARTED = "; write several values with slashes between them"


def _is_finite(value: object) -> bool:
    """Whether a value holds no NaN and no infinity: no arithmetic of a policy expects them."""
    if isinstance(value, tuple):
        return all(map(_is_finite, cast("tuple[object, ...]", value)))
    return not isinstance(value, float) or isfinite(value)


def plainly(error: msgspec.ValidationError) -> str:
    """The error of a value written as text, without the fact that it is text, as all of them are.

    Returns:
        `expected a whole number or null` and the like, or the error's own words.
    """
    number = fullmatch(r"Expected `(int|float)( \| null)?`, got `str`(.*)", str(error))
    if number is None:
        return str(error)
    what = "a whole number" if number[1] == "int" else "a number"
    return f"expected {what}{' or null' if number[2] else ''}{number[3]}"


def _choices(kind: object) -> str:
    if isinstance(kind, type) and issubclass(kind, StrEnum):
        return f"; expected one of {', '.join(member.value for member in kind)}"
    if kind is bool:
        return "; expected true or false"
    return ""
