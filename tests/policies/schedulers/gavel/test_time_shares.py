"""Shares of time: no other shares are better for whoever is worst off."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from coordinator.policies.schedulers.gavel.time_shares import (
    Gang,
    Spare,
    least_worst_finish,
    max_min,
)

often = settings(max_examples=150, deadline=None)

gangs = st.lists(
    st.builds(
        Gang,
        gpus=st.sampled_from((1, 1, 2, 4, 8)),
        left_s=st.integers(1, 500).map(float),
        passed_s=st.integers(0, 500).map(float),
        alone_s=st.integers(100, 900).map(float),
    ),
    min_size=1,
    max_size=8,
)
pools = st.integers(8, 24).map(float)
spares = st.sampled_from(list(Spare))


def used(shares: list[float], own: list[Gang]) -> float:
    """GPUs that the shares take on the average."""
    return sum(share * gang.gpus for share, gang in zip(shares, own, strict=True))


def worst_rho(shares: list[float], own: list[Gang]) -> float:
    """The greatest finish-time fairness."""
    return max(
        (gang.passed_s + gang.left_s / max(share, 1e-12)) / gang.alone_s
        for share, gang in zip(shares, own, strict=True)
    )


def least_service(shares: list[float], own: list[Gang]) -> float:
    """The least GPU time."""
    return min(share * gang.gpus for share, gang in zip(shares, own, strict=True))


def others(data: st.DataObject, own: list[Gang], gpus: float) -> list[float]:
    """Any other shares that the pool has room for."""
    shares = [data.draw(st.floats(0.01, 1.0)) for _ in own]
    scale = min(1.0, gpus / used(shares, own))
    return [share * scale for share in shares]


@often
@given(own=gangs, gpus=pools, spare=spares, data=st.data())
def test_no_shares_have_a_better_worst_finish(
    own: list[Gang], gpus: float, spare: Spare, data: st.DataObject
) -> None:
    """The greatest rho is the least that there is, whatever is done with the rest of the pool."""
    shares = least_worst_finish(own, gpus, spare)
    assert used(shares, own) <= gpus + 1e-6
    assert all(0.0 <= share <= 1.0 for share in shares)
    assert worst_rho(shares, own) <= worst_rho(others(data, own, gpus), own) * (1 + 1e-6)


@often
@given(own=gangs, gpus=pools, spare=spares, data=st.data())
def test_no_shares_have_a_greater_least_service(
    own: list[Gang], gpus: float, spare: Spare, data: st.DataObject
) -> None:
    """The least GPU time is the greatest that there is."""
    shares = max_min(own, gpus, spare)
    assert used(shares, own) <= gpus + 1e-6
    assert least_service(shares, own) >= least_service(others(data, own, gpus), own) - 1e-6


@often
@given(own=gangs, gpus=pools, spare=spares)
def test_the_pool_is_used_up(own: list[Gang], gpus: float, spare: Spare) -> None:
    """Nothing is left of the pool while a gang has less than all of the time."""
    for shares in (max_min(own, gpus, spare), least_worst_finish(own, gpus, spare)):
        asked = float(sum(gang.gpus for gang in own))
        assert used(shares, own) == pytest.approx(min(gpus, asked), rel=1e-6)


def test_twice_the_gpus_half_the_time() -> None:
    """Under scarcity GPU time is equal: of 4 GPUs, gangs of 4, 2 and 2 get 4/3 each."""
    own = [Gang(gpus=4), Gang(gpus=2), Gang(gpus=2)]
    assert max_min(own, 4.0) == pytest.approx([1 / 3, 2 / 3, 2 / 3])


def test_the_second_worst_off_counts_too() -> None:
    """A gang that cannot be helped leaves the rest to the others' worst, not to their mean."""
    hopeless = Gang(gpus=1, left_s=100.0, passed_s=900.0, alone_s=100.0)
    late = Gang(gpus=1, left_s=100.0, passed_s=100.0, alone_s=100.0)
    early = Gang(gpus=1, left_s=100.0, passed_s=0.0, alone_s=100.0)
    fair = least_worst_finish([hopeless, late, early], 2.0)
    even = least_worst_finish([hopeless, late, early], 2.0, Spare.EVEN)
    assert fair[0] == even[0] == pytest.approx(1.0)
    assert worst_rho(fair[1:], [late, early]) < worst_rho(even[1:], [late, early])
