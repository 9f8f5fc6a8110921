"""The GPU type on which a job competes that accepts several: room, spare workers, least load."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobId, JobState, NodeName
from coordinator.policies.contract.free_gpus import FreeGpus
from coordinator.policies.contract.snapshot import JobView, NodeView
from coordinator.policies.parts.pooling import (
    Order,
    by_deadline,
    by_submission,
    choices,
    chosen_types,
    hosting_types,
    pools,
)
from tests.harness.builders import (
    job_with,
    make_job_view,
    make_node_view,
    make_snapshot,
    make_worker_view,
)

BOTH = ("A100", "H100")


def nodes(*, a100: int = 8, h100: int = 8) -> list[NodeView]:
    """One of each type, with so many free GPUs of 8."""
    return [
        make_node_view("a", gpu_type="A100", free_gpus=a100),
        make_node_view("h", gpu_type="H100", free_gpus=h100),
    ]


def waits(name: str, gpus: int, *, types: tuple[str, ...] = BOTH, **other: object) -> JobView:
    """A gang of one worker."""
    made = make_job_view(name, gpus_per_worker=gpus, types=types)
    return job_with(made, **other)


def runs(
    name: str, node: str, gpu_type: str, *, base: int, flexible: int = 0
) -> tuple[JobView, NodeView]:
    """A job that runs alone on one node of 8, with workers of one GPU."""
    placed = [
        make_worker_view(name, index, node, is_flexible=index >= base)
        for index in range(base + flexible)
    ]
    job = make_job_view(
        name, state=JobState.RUNNING, workers=(base, 8), gpu_type=gpu_type, placed=placed
    )
    return job, make_node_view(node, gpu_type=gpu_type, workers=placed)


def chosen(
    there: Iterable[NodeView], jobs: Iterable[JobView], *, order: Order = by_submission
) -> dict[str, str]:
    """By job that waits."""
    snapshot = make_snapshot(nodes=there, jobs=jobs)
    found = chosen_types(snapshot, FreeGpus(snapshot), order=order)
    return {str(job_id): kind for job_id, kind in found.items()}


def test_a_job_takes_the_first_type_with_room_beside_those_before_it() -> None:
    """In its own order; a job of any type looks at all of them."""
    jobs = [waits("j1", 8), waits("j2", 8), waits("j3", 4, types=("H100", "A100"))]
    assert chosen(nodes(), jobs) == {"j1": "A100", "j2": "H100", "j3": "H100"}
    assert chosen(nodes(), [waits("j1", 8, types=()), waits("j2", 8, types=())]) == {
        "j1": "A100",
        "j2": "H100",
    }


def test_free_gpus_come_before_those_of_workers_that_others_can_do_without() -> None:
    """And those before a type where it would have to wait for a whole job."""
    elastic, a_node = runs("elastic", "a", "A100", base=4, flexible=4)
    assert chosen([a_node, make_node_view("h")], [elastic, waits("j", 4)])["j"] == "H100"
    full, h_node = runs("full", "h", "H100", base=8)
    both = [elastic, full, waits("j", 4, types=("H100", "A100"))]
    assert chosen([a_node, h_node], both)["j"] == "A100"


def test_spare_workers_on_one_node_come_before_a_type_with_less_to_do() -> None:
    """Three GPUs are spare on each of two nodes of one type, four on a node of the other."""
    first, a0 = runs("first", "a0", "A100", base=5, flexible=3)
    second, a1 = runs("second", "a1", "A100", base=5, flexible=3)
    third, h0 = runs("third", "h0", "H100", base=4, flexible=4)
    assert chosen([a0, a1, h0], [first, second, third, waits("j", 4)])["j"] == "H100"
    assert chosen([a0, a1, h0], [first, second, third, waits("j", 3)])["j"] == "A100"


def test_a_type_with_more_to_do_on_more_gpus_is_less_loaded() -> None:
    """What gangs ask for counts by GPU that is there, also by those that running jobs have."""
    held = [runs(f"r{at}", f"n{at}", "H100" if at else "A100", base=8) for at in range(3)]
    there, running = [node for _, node in held], [job for job, _ in held]
    assert chosen(there, [*running, waits("j", 8)])["j"] == "H100"


def test_jobs_on_nodes_that_take_no_workers_are_no_load_and_no_competitors() -> None:
    """Their GPUs come to nobody, whatever becomes of them."""
    gone, node = runs("gone", "a", "A100", base=8)
    half, h_node = runs("half", "h", "H100", base=8)
    drained = replace(node, is_schedulable=False)
    there = [drained, h_node, make_node_view("a1", gpu_type="A100", free_gpus=0)]
    jobs = [gone, half, waits("j", 8)]
    snapshot = make_snapshot(nodes=there, jobs=jobs)
    found = {pool.gpu_type: pool for pool in pools(snapshot, FreeGpus(snapshot))}
    assert [job.job_id for job in found["A100"].jobs] == []
    assert (found["A100"].gpus, found["H100"].gpus) == (0, 8)
    assert [job.job_id for job in found["H100"].jobs] == ["half", "j"]


def test_looking_leaves_the_floor_as_it_was() -> None:
    """What spare and movable workers have is counted, and not given away by that."""
    elastic, a_node = runs("elastic", "a", "A100", base=4, flexible=4)
    snapshot = make_snapshot(
        nodes=[a_node, make_node_view("h")], jobs=[elastic, waits("j", 8), waits("k", 4)]
    )
    floor = FreeGpus(snapshot)
    before = dict(floor.free)
    [a100, h100] = pools(snapshot, floor)
    assert (a100.gpus, h100.gpus) == (8, 8)
    assert floor.free == before == {"a": 0, "h": 8}


def test_a_gang_leaves_whole_nodes_to_those_behind_it() -> None:
    """It goes on the fullest nodes: the one behind it needs the whole node of the same type."""
    there = [
        make_node_view("a0", gpu_type="A100"),
        make_node_view("a1", gpu_type="A100", free_gpus=4),
        make_node_view("h0"),
    ]
    jobs = [waits("j0", 4), waits("j1", 8, types=("A100",)), waits("j2", 8)]
    line = [replace(job, submitted_at_s=float(at)) for at, job in enumerate(jobs)]
    assert chosen(there, line) == {"j0": "A100", "j1": "A100", "j2": "H100"}
    assert chosen(there, [line[0], replace(line[2], job_id=JobId("j1"))])["j1"] == "A100"


def test_where_no_type_has_room_the_least_loaded_is_chosen() -> None:
    """By what gangs there ask for, running and waiting, for the GPUs that can be shared out."""
    long, a_node = runs("long", "a", "A100", base=8)
    some, h_node = runs("some", "h", "H100", base=6)
    there = [a_node, h_node]
    assert chosen(there, [long, some, waits("j", 8)])["j"] == "H100"
    line = [waits(f"j{number}", 8, submitted_at_s=float(number)) for number in range(4)]
    found = chosen(there, [long, some, *line])
    assert [found[f"j{number}"] for number in range(4)] == ["H100", "A100", "H100", "A100"]


def test_who_comes_first_in_the_order_chooses_first() -> None:
    """By submission, or by deadline; one without any comes last."""
    early, due = waits("early", 8), waits("due", 8, submitted_at_s=5.0, deadline_at_s=200_000.0)
    assert chosen(nodes(), [early, due]) == {"early": "A100", "due": "H100"}
    assert chosen(nodes(), [early, due], order=by_deadline) == {"early": "H100", "due": "A100"}


@pytest.mark.parametrize(
    "job",
    [
        pytest.param(waits("j", 16), id="a worker larger than any node"),
        pytest.param(make_job_view("j", workers=(9, 9), gpus_per_worker=1), id="a gang too large"),
        pytest.param(
            make_job_view("j", gpus_per_worker=8, multiplier={"A100": 2, "H100": 2}),
            id="a gang too large with more workers for each",
        ),
        pytest.param(waits("j", 1, types=("T4",)), id="a type that is not there"),
        pytest.param(
            waits("j", 1, nodes_avoided=(NodeName("a"), NodeName("h"))), id="avoided nodes"
        ),
    ],
)
def test_a_gang_that_no_nodes_could_hold_competes_nowhere(job: JobView) -> None:
    """However many GPUs come free it would not start, and would only keep others waiting."""
    snapshot = make_snapshot(nodes=nodes(), jobs=[job, waits("other", 1)])
    assert chosen(nodes(), [job, waits("other", 1)]) == {"other": "A100"}
    found = pools(snapshot, FreeGpus(snapshot))
    assert [[each.job_id for each in pool.jobs] for pool in found] == [["other"], []]


def test_a_type_whose_nodes_could_not_hold_it_is_no_choice() -> None:
    """Though all types are busy, and it is the one with the least to do."""
    busy, h_node = runs("busy", "h", "H100", base=8)
    small = make_node_view("a", gpu_type="A100", gpus=4, free_gpus=0)
    assert chosen([small, h_node], [busy, waits("j", 8)])["j"] == "H100"
    drained = replace(make_node_view("a", gpu_type="A100"), is_schedulable=False)
    assert chosen([drained, h_node], [busy, waits("j", 8)])["j"] == "H100"


@pytest.mark.parametrize(
    ("free", "spare", "size", "expected"),
    [
        pytest.param((1, 8), 0, 1, "A100", id="its base gang has room on the first"),
        pytest.param((1, 8), 0, 4, "H100", id="its size on the second alone"),
        pytest.param((1, 3), 0, 4, "A100", id="its size nowhere"),
        pytest.param((4, 0), 4, 4, "A100", id="free before spare"),
        pytest.param(
            (1, 0), 4, 4, "H100", id="its size on spare GPUs before its base on free ones"
        ),
        pytest.param((1, 0), 3, 4, "A100", id="of that too few"),
    ],
)
def test_a_type_with_room_for_all_that_a_job_would_have_comes_first(
    free: tuple[int, int], spare: int, size: int, expected: str
) -> None:
    """Else it is by its base gang as if it would have no more."""
    there = nodes(a100=free[0], h100=free[1])
    job = replace(make_job_view("j", workers=(1, 8)), gpu=waits("j", 1).gpu)
    running: list[JobView] = []
    if spare:
        elastic, there[1] = runs("elastic", "h", "H100", base=8 - spare, flexible=spare)
        running.append(elastic)
    snapshot = make_snapshot(nodes=there, jobs=[*running, job])
    found = chosen_types(snapshot, FreeGpus(snapshot), size=lambda _: size)
    assert found == {"j": expected}


def test_who_chooses_takes_all_that_it_would_have_from_those_behind() -> None:
    """Eight GPUs of the first type are six for the one and none for the other of four."""
    jobs = [replace(make_job_view(name, workers=(4, 8)), gpu=waits("", 1).gpu) for name in "jk"]
    snapshot = make_snapshot(nodes=nodes(), jobs=jobs)
    found = chosen_types(
        snapshot, FreeGpus(snapshot), size=lambda job: 6 if job.job_id == "j" else 4
    )
    assert found == {"j": "A100", "k": "H100"}


def test_workers_that_stand_for_one_are_counted_on_their_type() -> None:
    """A gang of two workers of 2 is one of four on a type of which each stands for two."""
    double = make_job_view(
        "j", workers=(2, 2), gpus_per_worker=2, types=BOTH, multiplier={"A100": 2}
    )
    assert chosen(nodes(a100=4), [double]) == {"j": "H100"}
    assert chosen(nodes(a100=8), [double]) == {"j": "A100"}


@pytest.mark.parametrize(
    ("a100", "h100", "expected"),
    [
        pytest.param(8, 8, "A100", id="free GPUs of its own"),
        pytest.param(7, 8, "H100", id="free GPUs of the other type alone"),
        pytest.param(7, 7, "A100", id="of neither"),
        pytest.param(1, 7, "A100", id="of neither, the other with less to do"),
    ],
)
def test_who_has_a_type_leaves_it_only_for_free_gpus(a100: int, h100: int, expected: str) -> None:
    """Not for spare workers, nor for less to do; and never while its own has room."""
    job = waits("j", 8, types=("H100", "A100"))
    snapshot = make_snapshot(nodes=nodes(a100=a100, h100=h100), jobs=[job])
    floor = FreeGpus(snapshot)
    hosting = hosting_types(snapshot, floor)
    assert hosting == {"j": ("H100", "A100")}
    found = choices(snapshot, floor, hosting, standing={JobId("j"): "A100"})
    assert found == {"j": expected}


_JOBS = st.lists(
    st.builds(
        lambda gpus, types, min_workers, factor, at_s: (gpus, types, min_workers, factor, at_s),
        st.integers(1, 9),
        st.sampled_from([(), ("A100",), ("H100",), ("A100", "H100"), ("H100", "A100"), ("T4",)]),
        st.integers(1, 3),
        st.integers(1, 2),
        st.integers(0, 3),
    ),
    max_size=6,
)


@given(_JOBS, st.integers(0, 8), st.integers(0, 8))
def test_a_waiting_job_is_in_one_pool_of_a_type_that_it_accepts_or_in_none(
    drawn: list[tuple[int, tuple[str, ...], int, int, int]], a100: int, h100: int
) -> None:
    """In none only where no type that it accepts has a node large enough for its gang."""
    jobs = [
        make_job_view(
            f"j{number}",
            gpus_per_worker=gpus,
            types=types,
            workers=(least, least),
            multiplier={"A100": factor},
            submitted_at_s=float(at_s),
        )
        for number, (gpus, types, least, factor, at_s) in enumerate(drawn)
    ]
    snapshot = make_snapshot(nodes=nodes(a100=a100, h100=h100), jobs=jobs)
    found = pools(snapshot, FreeGpus(snapshot))
    for job in jobs:
        mine = [pool.gpu_type for pool in found if job in pool.jobs]
        could = [
            kind
            for kind in job.gpu.types or BOTH
            if kind in BOTH and job.workers_on(kind).min * job.gpus_per_worker <= 8
        ]
        assert len(mine) == bool(could)
        assert set(mine) <= set(could)
