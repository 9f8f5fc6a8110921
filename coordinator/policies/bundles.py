"""Policy bundles by name, in one explicit table. Must not know the engine.

A bundle is rules over the same parts: order (queueing), size (scaling), place (placement), loan
(loaning, forecast) and reclaim (reclaiming). Whoever compares policies changes one rule at a time:
`aryl:reclaim=random:resize_cost_s=0` is `aryl` with two of its knobs turned.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import msgspec
from msgspec import Struct, structs

from common.errors import ConfigError
from common.model import NodeName
from coordinator.policies.blockers import Hold
from coordinator.policies.decisions import (
    Decision,
)
from coordinator.policies.passes import (
    Allocation,
    Rules,
    allocate,
    hold,
    keep,
    lend,
)
from coordinator.policies.preemptive import (
    Left,
    by_least_left,
    remaining_service,
    remaining_time,
    why_waiting,
)
from coordinator.policies.queueing import (
    shortest_key,
    submission_key,
)
from coordinator.policies.reclaim_rules import ReclaimRule
from coordinator.policies.snapshot import ClusterSnapshot


def _nobody(snapshot: ClusterSnapshot) -> tuple[Hold, ...]:
    return ()


def _nothing(snapshot: ClusterSnapshot, name: NodeName) -> tuple[str, ...]:
    return ()


class Policy(Struct, frozen=True, kw_only=True):
    """A bundle: who starts where (`allocate`), and what is lent or taken back (`lend`).

    hold: why each job that waits would not start in a pass now; asked only when somebody wants
        to know, as that costs more than the pass.
    keep: why a node of a service that serves is not lent, the service's balance first.
    rules: what it is made of, where it is made of rules alone.
    """

    name: str
    description: str
    allocate: Callable[[ClusterSnapshot, bytes], Allocation]
    lend: Callable[[ClusterSnapshot], tuple[Decision, ...]]
    hold: Callable[[ClusterSnapshot], tuple[Hold, ...]] = _nobody
    keep: Callable[[ClusterSnapshot, NodeName], tuple[str, ...]] = _nothing
    rules: Rules | None = None


# --- the table ------------------------------------------------------------------------------


def bundle(name: str, description: str, rules: Rules) -> Policy:
    """A policy from rules."""
    return Policy(
        name=name,
        description=description,
        allocate=partial(allocate, rules),
        lend=partial(lend, rules),
        hold=partial(hold, rules),
        keep=partial(keep, rules),
        rules=rules,
    )


def preemptive(name: str, description: str, left: Left) -> Policy:
    """A policy that stops jobs for others with less left; it lends nothing."""

    def allocate_by_least_left(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        return Allocation(decisions=by_least_left(snapshot, left), memory=memory)

    rules = Rules(order=submission_key)
    return Policy(
        name=name,
        description=description,
        allocate=allocate_by_least_left,
        lend=partial(lend, rules),
        keep=partial(keep, rules),
        hold=lambda snapshot: why_waiting(snapshot, left),
    )


POLICIES: dict[str, Policy] = {
    made.name: made
    for made in (
        bundle(
            "fifo",
            "strict order of submission: the first that does not fit blocks the rest of its type",
            Rules(order=submission_key, is_strict=True),
        ),
        bundle(
            "fifo-skip",
            "order of submission, skipping what does not fit",
            Rules(order=submission_key),
        ),
        bundle("sjf", "shortest job first, skipping what does not fit", Rules(order=shortest_key)),
        preemptive(
            "srtf",
            "least remaining time first, preempting jobs with more left",
            remaining_time,
        ),
        preemptive(
            "srsf",
            "least remaining time x GPUs first, preempting jobs with more left",
            remaining_service,
        ),
        bundle(
            "aryl",
            "shortest base demand first, flexible workers by knapsack, capacity loaning",
            Rules(order=shortest_key, is_scaling=True, is_loaning=True),
        ),
        bundle(
            "foresight",
            "aryl with loans that outlive their jobs, nodes kept for the aged, and whole nodes",
            Rules(
                order=shortest_key,
                is_scaling=True,
                is_loaning=True,
                separates_at_home=True,
                claim_ratio=0.5,
                lifetime_quantile=0.5,
                lend_quantile=0.9,
                waits_for_finish=True,
            ),
        ),
        bundle(
            "aryl-loan",
            "aryl with loans and without scaling",
            Rules(order=shortest_key, is_loaning=True),
        ),
        bundle(
            "aryl-elastic",
            "aryl with scaling and without loans",
            Rules(order=shortest_key, is_scaling=True),
        ),
        bundle(
            "aryl-random",
            "aryl-loan that takes lent nodes back at random",
            Rules(order=shortest_key, is_loaning=True, reclaim=ReclaimRule.RANDOM),
        ),
        bundle(
            "aryl-scf",
            "aryl-loan that takes the lent nodes with the fewest jobs back",
            Rules(order=shortest_key, is_loaning=True, reclaim=ReclaimRule.FEWEST_JOBS),
        ),
        bundle(
            "opportunistic",
            "jobs for both GPU types run as guests of the inference cluster, and only there",
            Rules(
                order=shortest_key,
                is_loaning=True,
                waits_for_loan=True,
                reclaim=ReclaimRule.RANDOM,
            ),
        ),
    )
}


KNOBS = {field.name: field.type for field in structs.fields(Rules) if field.name != "order"}
"""What can be turned of a policy made of rules, and its type."""


def policy(name: str) -> Policy:
    """A policy by name, with knobs turned where it says so: `NAME:KNOB=VALUE:KNOB=VALUE`.

    Raises:
        ConfigError: an unknown name, which lists the valid ones; a knob that the policy does not
            have, or a value that is none of its.
    """
    base, *turned = name.split(":")
    found = POLICIES.get(base)
    if found is None:
        raise ConfigError(f"policy: {base!r} is not one of {', '.join(sorted(POLICIES))}")
    if not turned:
        return found
    if found.rules is None:
        raise ConfigError(f"policy: {base} has no knobs")
    rules = structs.replace(found.rules, **dict(_knob(base, text) for text in turned))
    return bundle(name, found.description, rules)


def _knob(policy: str, text: str) -> tuple[str, object]:
    key, has_value, value = text.partition("=")
    if key not in KNOBS or not has_value:
        raise ConfigError(
            f"policy {policy}: {text!r} turns no knob; expected KNOB=VALUE with one of "
            f"{', '.join(sorted(KNOBS))}"
        )
    try:
        return key, msgspec.convert(value, KNOBS[key], strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"policy {policy}: {key}={value}: {error}") from None
