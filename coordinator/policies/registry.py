"""The table of policies by name.

A comparison changes one rule at a time: `aryl:reclaim=random:resize_cost_s=0` is `aryl` with two of
its knobs changed. Drivers may add policies of other distributions.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Container, Iterable, Iterator
from itertools import groupby
from re import fullmatch
from typing import Any

from msgspec import Struct

from common.errors import ConfigError
from coordinator.policies.aryl.reclaim.rules import ReclaimRule
from coordinator.policies.aryl.rules import Claiming, Lending, Lifetime, Rules, Scaling
from coordinator.policies.aryl.shortest_first import shortest_key, submission_key
from coordinator.policies.policy import Policy, bundle, knobs_of, turned
from coordinator.policies.schedulers import preemptive, tetris, yarn
from coordinator.policies.schedulers.afs import policy as afs_policy
from coordinator.policies.schedulers.drf import policy as drf_policy
from coordinator.policies.schedulers.gandiva import policy as gandiva
from coordinator.policies.schedulers.gandiva import sets as gandiva_sets
from coordinator.policies.schedulers.gavel import policy as gavel_policy
from coordinator.policies.schedulers.mesos import policy as mesos_policy
from coordinator.policies.schedulers.philly import policy as philly_policy
from coordinator.policies.schedulers.pollux import policy as pollux_policy
from coordinator.policies.schedulers.qos.edf import EDF
from coordinator.policies.schedulers.qos.elasticflow import ELASTICFLOW
from coordinator.policies.schedulers.qos.policy import QOS
from coordinator.policies.schedulers.themis import policy as themis
from coordinator.policies.schedulers.themis import simple as themis_simple
from coordinator.policies.schedulers.tiresias import policy as tiresias

RESERVED = frozenset({"all"})
"""Names that stand for something else where policies are named."""

_NAME = re.compile(r"[a-z0-9][a-z0-9_-]{0,63}")
"""The text allowed between the commas and colons of `NAME:KNOB=VALUE,NAME`."""


class Added(Struct, frozen=True, kw_only=True):
    """A name that a distribution offers, and the policy behind it.

    origin: the distribution and its version.
    problem: why there is no policy; empty: there is.
    """

    name: str
    origin: str
    made: Policy | None = None
    problem: str = ""


def offered(name: str, origin: str, value: object) -> Added:
    """The object of an entry point as a policy of its name, or the reason why it is none."""
    problem = ""
    if not _NAME.fullmatch(name):
        problem = "its name has characters other than a-z, 0-9, - and _"
    elif name in RESERVED:
        problem = "its name is reserved"
    elif not isinstance(value, Policy):
        problem = f"it is a {type(value).__name__}, expected a coordinator.policies.policy.Policy"
    elif value.name != name:
        problem = f"its policy calls itself {value.name!r}, expected the entry point's name"
    if problem or not isinstance(value, Policy):
        return Added(name=name, origin=origin, problem=problem)
    return Added(name=name, origin=origin, made=value)


def settled(found: Iterable[Added], taken: Container[str]) -> Iterator[Added]:
    """One policy of each name, by name.

    A name of the table stays the table's. A name that two distributions offer belongs to neither:
    an operator could not see which one decides.
    """
    ordered = sorted(found, key=lambda each: (each.name, each.origin))
    for name, group in groupby(ordered, key=lambda each: each.name):
        offers = list(group)
        origin = " and ".join(each.origin for each in offers)
        if name in taken:
            problem = "the built-in policy of this name stays"
            yield Added(name=name, origin=origin, problem=problem)
        elif len(offers) > 1:
            yield Added(name=name, origin=origin, problem="they offer the same name; remove one")
        else:
            yield offers[0]


__all__ = [
    "COMPARED",
    "KNOBS",
    "POLICIES",
    "Policy",
    "add",
    "bundle",
    "every",
    "policy",
    "unusable",
]

RESERVATION_AFTER_S = 14_400.0
"""Under the policies that are recommended: it costs nothing on the paper's workloads, where a gang
waited for up to five days without it (docs/policies.md)."""

_BUNDLES = (
    bundle(
        "fifo",
        "strict order of submission: the first job that does not fit blocks the rest of "
        "its GPU type, unless it could never run",
        Rules(order=submission_key, is_strict=True),
    ),
    bundle(
        "fifo-skip",
        "order of submission, skipping jobs that do not fit",
        Rules(order=submission_key),
    ),
    bundle("sjf", "shortest job first, skipping jobs that do not fit", Rules(order=shortest_key)),
    bundle(
        "aryl",
        "shortest base demand first, flexible workers by knapsack, capacity loaning",
        Rules(
            order=shortest_key,
            scaling=Scaling(),
            lending=Lending(),
            reservation_after_s=RESERVATION_AFTER_S,
        ),
    ),
    bundle(
        "foresight",
        "aryl with loans that outlive their jobs, nodes kept free for long-waiting jobs, "
        "and whole-node placement",
        Rules(
            order=shortest_key,
            scaling=Scaling(separates_at_home=True),
            lending=Lending(
                waits_for_finish=True,
                quantile=0.9,
                lifetime=Lifetime(quantile=0.25, odds=True, near_quantile=0.9),
            ),
            claiming=Claiming(ratio=0.5),
            reservation_after_s=RESERVATION_AFTER_S,
        ),
    ),
    bundle(
        "aryl-loan",
        "aryl with loans and without scaling",
        Rules(order=shortest_key, lending=Lending()),
    ),
    bundle(
        "aryl-elastic",
        "aryl with scaling and without loans",
        Rules(order=shortest_key, scaling=Scaling()),
    ),
    bundle(
        "gandiva-lyra",
        "Gandiva as in Lyra's evaluation: FIFO, growth only while no job waits",
        Rules(order=submission_key, is_strict=True, scaling=Scaling(grows_when_idle=True)),
    ),
    bundle(
        "aryl-random",
        "aryl-loan that reclaims random lent nodes",
        Rules(order=shortest_key, lending=Lending(reclaim=ReclaimRule.RANDOM)),
    ),
    bundle(
        "aryl-scf",
        "aryl-loan that reclaims the lent nodes with the fewest jobs",
        Rules(order=shortest_key, lending=Lending(reclaim=ReclaimRule.FEWEST_JOBS)),
    ),
    bundle(
        "opportunistic",
        "jobs that fit both GPU types run only on lent nodes, as guests of the inference cluster",
        Rules(
            order=shortest_key,
            lending=Lending(reclaim=ReclaimRule.RANDOM),
            waits_for_loan=True,
        ),
    ),
)

POLICIES: dict[str, Policy] = {
    made.name: made
    for made in (
        *_BUNDLES,
        *afs_policy.POLICIES,
        QOS,
        ELASTICFLOW,
        EDF,
        *gandiva.POLICIES,
        *gandiva_sets.POLICIES,
        *pollux_policy.POLICIES,
        *preemptive.POLICIES,
        *gavel_policy.POLICIES,
        *philly_policy.POLICIES,
        *themis.POLICIES,
        *themis_simple.POLICIES,
        *tiresias.POLICIES,
        *drf_policy.POLICIES,
        *mesos_policy.POLICIES,
        *tetris.POLICIES,
        *yarn.POLICIES,
    )
}
"""Every policy under its own name."""

COMPARED = (
    *("fifo", "fifo-skip", "sjf", "srtf", "srsf", "aryl", "foresight"),
    *("themis", "qos", "tiresias", "gandiva", "philly"),
    *("drf", "tetris", "yarn", "mesos", "afs", "pollux"),
)
"""One of each system, in the order in which a comparison of all shows them."""

KNOBS: dict[str, Any] = {
    knob: kind for made in POLICIES.values() for knob, kind in knobs_of(made).items()
}
"""The knobs that any policy has."""


_ADDED: dict[str, Added] = {}


def add(found: Iterable[Added]) -> tuple[Added, ...]:
    """Let policies of other distributions in, in place of those that were let in before.

    Returns:
        One of each name, by name; those that cannot be used say why.
    """
    _ADDED.clear()
    _ADDED.update({each.name: each for each in settled(found, POLICIES)})
    return tuple(_ADDED.values())


def every() -> dict[str, Policy]:
    """Every policy that can be used, those of other distributions last."""
    return POLICIES | {each.name: each.made for each in _ADDED.values() if each.made is not None}


def unusable(each: Added) -> str:
    """Why a policy of another distribution cannot be used, in a sentence."""
    return f"policy {each.name!r} of {each.origin} cannot be used: {each.problem}"


def policy(name: str, *, also: Iterable[str] = (), is_whole: bool = True) -> Policy:
    """A policy by name, with knobs turned where it says so: `NAME:KNOB=VALUE:KNOB=VALUE`.

    Args:
        also: words that stand for something else where the name came from; listed with the names.
        is_whole: no more knobs are turned of it, so that each must decide something.

    Raises:
        ConfigError: an unknown name, which lists the valid ones; one of another distribution that
            cannot be used; a knob that the policy does not have, a value that is none of its, or,
            of a whole name, a knob that decides nothing while another one is off.
    """
    base, *texts = name.split(":")
    found = POLICIES.get(base)
    if found is None:
        found = _added(base, also)
    return turned(found, name, texts, is_whole=is_whole)


def _added(name: str, also: Iterable[str]) -> Policy:
    each = _ADDED.get(name)
    if each is None:
        if "=" in name:
            raise ConfigError(
                f"policy: {name!r} is not a policy; write each knob behind the policy's name "
                "with a colon: aryl:reclaim=random:resize_cost_s=0"
            )
        raise ConfigError(f"policy: {name!r} {_unlike(name, (*also, *sorted(every())))}")
    if each.made is None:
        raise ConfigError(unusable(each))
    return each.made


def _unlike(name: str, known: tuple[str, ...]) -> str:
    """The error for an unknown name: the probably meant name, then all names."""
    if fullmatch(r"[-+.\de]*\d[-+.\de]*", name):
        # A comma parts policies, so that `tiresias:limits=5000,9000` reads `9000` as one.
        return (
            "is not a policy; write several values of one knob with slashes: "
            "tiresias:limits=3600/14400"
        )
    listed = ", ".join(known)
    if near := difflib.get_close_matches(name, known):
        return f"is not one of the policies; did you mean {' or '.join(near)}? There are {listed}"
    return f"is not one of {listed}"
