"""One policy of each family, for rules that hold for all: the sample that cells are played with.

What policies share is one piece of code around each of them (`coordinator.policies.policy`), and
those of a family differ by knobs or by an order. A single pass costs so little that it is looked at
under every policy; properties draw from all of them.
"""

from __future__ import annotations

from coordinator.policies.registry import POLICIES

FAMILIES = (
    "afs-p",
    "aryl",
    "drf",
    "fifo",
    "foresight",
    "gandiva",
    "las",
    "mesos",
    "philly",
    "pollux",
    "qos-elasticflow",
    "srtf",
    "tetris",
    "themis",
    "tiresias",
    "yarn-fair",
)


def family(policy: str) -> str:
    """The package, or the module that stands alone, in which a policy's knobs are defined."""
    return ".".join(type(POLICIES[policy].knobs).__module__.split(".")[:4])
