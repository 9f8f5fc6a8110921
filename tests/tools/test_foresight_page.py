"""docs/foresight.md: what is worse than `aryl` beyond chance is marked, and only that."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from msgspec import structs

from coordinator.sim.statistics import estimate
from tools.foresight_page import is_beyond, paired
from tools.play_foresight import Kept, read_kept

KEPT_RUNS = {(run.workload, run.policy): run for run in read_kept()}
SEEDS = range(1, 6)


def runs(less: Sequence[int]) -> dict[tuple[str, str], Kept]:
    """Five seeds of the overload on which `foresight` is `aryl` but for its preemptions.

    less: by how much it has more of them, seed by seed.
    """
    found: dict[tuple[str, str], Kept] = {}
    for seed, more in zip(SEEDS, less, strict=True):
        name = f"paper-overload-{seed}"
        aryl = KEPT_RUNS[name, "aryl"]
        stopped = aryl.result.preemptions + more
        ours = structs.replace(
            aryl,
            policy="foresight",
            result=structs.replace(aryl.result, policy="foresight", preemptions=stopped),
        )
        found |= {(name, "sjf"): aryl, (name, "aryl"): aryl, (name, "foresight"): ours}
    return found


@pytest.mark.parametrize(
    ("less", "is_worse"),
    [((9, 10, 11, 10, 10), True), ((0, 0, 0, 0, 50), False), ((-9, -10, -11, -10, -10), False)],
)
def test_what_is_worse_by_more_than_its_interval_is_named(
    less: tuple[int, ...], *, is_worse: bool
) -> None:
    """A difference that every seed has is; one seed's bad luck is not, nor what is better."""
    told = paired(runs(less))
    assert ("preemptions on `paper-overload`" in told) == is_worse
    assert ("| preemptions | **" in told) == is_worse
    assert ("more than the interval: nothing." in told) != is_worse


def test_what_no_seed_changes_is_not_worse() -> None:
    """No difference has no interval either, and is no harm; a single seed says nothing."""
    assert not is_beyond(estimate([0.0] * 5))
    assert not is_beyond(estimate([7.0]))
    assert is_beyond(estimate([7.0] * 5))


def test_what_is_shipped_is_worse_than_aryl_in_no_row() -> None:
    """The kept runs, as the page shows them."""
    assert "Worse than `aryl` by more than the interval: nothing." in paired(KEPT_RUNS)
