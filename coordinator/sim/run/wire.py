"""The wire between coordinator and simulated nodes: loses messages by seed, and sends them again.

Chance is an argument: the same seed loses the same messages.
"""

from __future__ import annotations

from random import Random

from msgspec import Struct


class WireRules(Struct, frozen=True, kw_only=True):
    """How messages travel.

    loss_ratio: fraction of the messages that never arrive, both ways, 0 to 1 (exclusive).
    seed: which ones.
    push_retry_s: a desired state that the node's reports do not show is sent again after this, as
        by the live coordinator.
    report_period_s: a node repeats the content of a lost report after this.
    """

    loss_ratio: float = 0.0
    seed: int = 1
    push_retry_s: float = 2.0
    report_period_s: float = 1.0

    def __post_init__(self) -> None:
        """Refuse a wire over which nothing ever comes."""
        if not 0.0 <= self.loss_ratio < 1.0:
            raise ValueError(f"loss_ratio {self.loss_ratio:g}, expected at least 0 and below 1")


class Wire:
    """Which messages arrive."""

    def __init__(self, rules: WireRules) -> None:
        self._rules = rules
        self._random = Random(rules.seed)
        self.lost = 0
        self.is_lossy = rules.loss_ratio > 0.0
        """Whether anything is ever lost."""

    @property
    def push_retry_s(self) -> float:
        """Seconds until a lagging node gets its state again."""
        return self._rules.push_retry_s

    @property
    def report_period_s(self) -> float:
        """Seconds until a lost report is repeated."""
        return self._rules.report_period_s

    def arrives(self) -> bool:
        """Whether the next message does."""
        if not self.is_lossy or self._random.random() >= self._rules.loss_ratio:
            return True
        self.lost += 1
        return False
