"""One policy of each family, for rules that hold for all: the sample that cells are played with.

What policies share is one piece of code around each of them (`coordinator.policies.policy`), and
those of a family differ by knobs or by an order. A single pass costs so little that it is looked at
under every policy; properties draw from all of them.
"""

from __future__ import annotations

from coordinator.policies.policy import NoKnobs
from coordinator.policies.registry import POLICIES

FAMILIES = (
    "afs",
    "afs-p",
    "aryl",
    "drf",
    "fifo",
    "foresight",
    "gandiva",
    "gandiva-sets",
    "las",
    "mesos",
    "philly",
    "pollux",
    "qos",
    "qos-edf",
    "qos-elasticflow",
    "srsf",
    "srtf",
    "tetris",
    "themis",
    "themis-simple",
    "tiresias",
    "yarn",
    "yarn-fair",
)


def family(policy: str) -> str:
    """The module in which a policy's knobs are defined; the first word of its name without any."""
    knobs = POLICIES[policy].knobs
    return policy.partition("-")[0] if isinstance(knobs, NoKnobs) else type(knobs).__module__
