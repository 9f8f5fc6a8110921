"""Chance from a seed and a count of draws, so that a pass can be repeated. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from hashlib import sha256

GOLDEN_RATIO = (5.0**0.5 - 1.0) / 2.0


class Chance:
    """Draws that follow from a seed and how many there were."""

    def __init__(self, seed: int, draws: int) -> None:
        self._seed = seed
        self.draws = draws

    def shuffled(self, names: Sequence[str]) -> list[str]:
        """In an order that looks like chance."""
        self.draws += 1
        return sorted(names, key=lambda name: self._digest(name))

    def ratio(self, name: str) -> float:
        """From 0 to 1."""
        self.draws += 1
        return int.from_bytes(self._digest(name)[:6]) / float(1 << 48)

    def spaced(self) -> float:
        """From 0 to 1, as far from those of the draws before as can be (the golden ratio's way)."""
        self.draws += 1
        return self.draws * GOLDEN_RATIO % 1.0

    def _digest(self, name: str) -> bytes:
        return sha256(f"{self._seed} {self.draws} {name}".encode()).digest()
