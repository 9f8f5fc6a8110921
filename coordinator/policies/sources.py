"""Where an estimate comes from, and how far off each source may be. Must not know jobs or costs.

The engine words its sources by this enumeration, with details behind them, and policies ask here;
so a new source is a guess until it says otherwise, and no policy reads words of its own.
"""

from __future__ import annotations

from enum import StrEnum


class Source(StrEnum):
    """The word or words that an estimate's source begins with, best known first."""

    LIVE = "live progress"
    PRERUN = "length of its pre-run"
    """A limit that the engine keeps."""
    EARLIER = "progress of an earlier attempt"
    DECLARED = "declared"
    HISTORY = "history"
    """Of the same tenant, name and command."""
    SIZE = "median"
    """Of other jobs of the size: a guess."""
    OUTLIVED = "an earlier attempt that outlived the estimate"
    """A guess: how much longer it takes is not known."""
    LEDGER = "recovered from a node's ledger"
    """What was done before is not known: a guess."""
    DEFAULT = "default"
    """A guess."""


LATE_RATIOS = {
    Source.LIVE: 1.25,
    Source.PRERUN: 1.0,
    Source.EARLIER: 1.5,
    Source.DECLARED: 1.5,
    Source.HISTORY: 2.0,
}
"""How many times its estimate a job may take and still be waited for, by the estimate's source.
An earlier attempt was measured, but may have had another GPU type. What is not named here is a
guess, and nobody waits for it."""


def late_ratio(source: str) -> float | None:
    """How many times its estimate a job may take; None: the estimate is a guess.

    Args:
        source: what `JobView.estimate_source` says; words that are no source are a guess.
    """
    for known, ratio in LATE_RATIOS.items():
        if source.startswith(known):
            return ratio
    return None
