"""Victims that make room for a gang: enough of them, and none in vain."""

from __future__ import annotations

from collections.abc import Callable

from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.schedulers.drf.policy import fewest_victims

SIZES = st.lists(st.integers(0, 4), max_size=8)


def found(
    sizes: list[int], wanted: int, may_go: Callable[[int], bool] = lambda _: True
) -> tuple[list[int] | None, int]:
    """Places in line of the victims for so many GPUs, and what came free."""
    free = 0

    def move(at: int, sign: int) -> None:
        nonlocal free
        free += sign * sizes[at]

    line = range(len(sizes))
    return fewest_victims(line, may_go=may_go, move=move, fits=lambda: free >= wanted), free


def test_victims_go_in_the_order_of_the_line() -> None:
    """Whoever stands behind the one that made it fit is not looked at."""
    victims, _ = found([1, 1, 1, 1], 2)
    assert victims is not None
    assert sorted(victims) == [0, 1]


def test_whoever_is_not_needed_in_the_end_stays() -> None:
    """The second one alone is enough: the first was taken before that was known."""
    assert found([1, 4], 4) == ([1], 4)


def test_whoever_may_not_go_stays() -> None:
    """Even where it would be the only one."""
    assert found([4, 1], 4, may_go=lambda at: at > 0) == (None, 0)


@given(sizes=SIZES, wanted=st.integers(1, 12))
def test_nobody_goes_in_vain(sizes: list[int], wanted: int) -> None:
    """MinimalVictims: without any one of them it would not fit; without room nobody goes at all."""
    victims, free = found(sizes, wanted)
    if victims is None:
        assert (sum(sizes) < wanted, free) == (True, 0)
        return
    assert free == sum(sizes[at] for at in victims) >= wanted
    assert all(free - sizes[at] < wanted for at in victims)
