"""GPUs that fall ill or are trespassed on while jobs run, on the real engine: what policies see of
each worker, and that nobody is stopped for one that cannot start then."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from msgspec import Struct
from msgspec.structs import replace

from common.messages import GpuHealth
from common.model import CheckpointSpec, GpuUuid, JobId, JobState, NodeName
from coordinator.engine.state.events import Event, NodeReported, PassDue, TrespassFact
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resize,
    Start,
)
from coordinator.policies.contract.snapshot import WorkerView
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.simulation import Submission
from tests.policies.families import FAMILIES
from tests.policies.sharing_cell import DELAYS
from tests.policies.tenant_passes import NODE_GPUS, Asked, Cell
from tests.tables import each_row

ILL_AT_S, WELL_AT_S, END_S = 100.0, 700.0, 1500.0
LOOK_S = DELAYS.stop_s / 5
"""Between two looks at a job that moves: it is seen several times while its workers leave."""
BOTH = (TenantSettings(name="poor", guarantee_gpus=8), TenantSettings(name="rich"))

Bad = Mapping[str, bool]
"""GPUs that are barred, by UUID: whether a stranger computes there; else it is not well."""


class Ward(Cell):
    """A cell of which some GPUs are barred for a while. All that the engine holds is checked.

    vain: stops, while GPUs are barred, where nobody came in the same pass to a node that the victim
    was to leave.
    """

    def __init__(
        self,
        policy: str,
        bad: Bad,
        *,
        tenants: Sequence[TenantSettings] = (),
        nodes: int = 2,
        ill_at_s: float = ILL_AT_S,
    ) -> None:
        self._bad = bad
        self._is_ill = False
        self._made: list[Decision] = []
        self.vain: list[Preempt] = []
        delays = Delays(**{name: getattr(DELAYS, name) for name in ("start_s", "stop_s")})
        super().__init__(
            policy, tenants, nodes=nodes, resize_cooldown_s=0.0, delays=delays, check=True
        )
        self.hear = self._made.extend
        self.loop.at(ill_at_s, lambda: self._turn(is_ill=True))
        self.loop.at(WELL_AT_S, lambda: self._turn(is_ill=False))

    def _turn(self, *, is_ill: bool) -> None:
        self._is_ill = is_ill
        for node in self.nodes.values():
            node.report_soon()

    def submit(self, submissions: Iterable[Submission]) -> None:
        """Every job saves when it is asked: no policy spares it for what it would lose."""
        saves = CheckpointSpec(path="/saves", grace_s=10.0)
        super().submit(
            [replace(each, spec=replace(each.spec, checkpoint=saves)) for each in submissions]
        )

    def handle(self, event: Event) -> None:
        """Reports say what is barred; of each pass it is noted who was stopped in vain."""
        if isinstance(event, NodeReported) and self._is_ill:
            event = self._as_ill(event)
        self._made.clear()
        super().handle(event)
        came = {place.node for made in self._made for place in _places(made)}
        for made in self._made if isinstance(event, PassDue) and self._is_ill else ():
            if isinstance(made, Preempt) and came.isdisjoint(self._nodes_of(made.job_id)):
                self.vain.append(made)

    def _nodes_of(self, name: JobId) -> set[NodeName]:
        return {worker.node for worker in self.engine.state.jobs[name].workers.values()}

    def _as_ill(self, event: NodeReported) -> NodeReported:
        health = {
            uuid: GpuHealth.LOST for uuid, is_stranger in self._bad.items() if not is_stranger
        }
        gpus = tuple(replace(gpu, health=health.get(gpu.uuid, gpu.health)) for gpu in event.gpus)
        trespasses = tuple(
            TrespassFact(7, gpu.uuid) for gpu in event.gpus if self._bad.get(gpu.uuid)
        )
        return replace(event, gpus=gpus, trespasses=trespasses)

    def seen(self, name: str) -> list[WorkerView]:
        """A job's workers as policies see them, the same on their nodes."""
        snapshot = self.engine.snapshot()
        [job] = [job for job in snapshot.jobs if job.job_id == name]
        there = [w for node in snapshot.nodes for w in node.workers if w.job_id == name]
        assert sorted(there, key=lambda w: w.worker_index) == list(job.placed)
        return list(job.placed)


def _places(made: Decision) -> tuple[Placement, ...]:
    match made:
        case Start() | Migrate():
            return made.placements
        case Resize():
            return made.added
        case _:
            return ()


@pytest.mark.parametrize("is_stranger", [False, True])
def test_policies_see_what_a_worker_would_free_as_soon_as_it_changes(*, is_stranger: bool) -> None:
    """On its job and on its node, when a GPU of it falls ill or is trespassed on, and after."""
    cell = Ward("fifo", {"n0-0": is_stranger, "n0-7": is_stranger}, nodes=1)
    cell.ask([Asked(tenant="a", gpus=4, work_s=5000.0)])
    for until_s, freed, barred in ((90.0, 4, ()), (150.0, 3, ("n0-0",)), (750.0, 4, ())):
        cell.run(until_s=until_s)
        [worker] = cell.seen("a0")
        assert (worker.gpus, worker.freed_gpus, worker.barred_uuids) == (4, freed, barred)
        [node] = cell.engine.snapshot().nodes
        assert node.barred_gpus == (2 if barred else 0)
        assert node.free_gpus == (3 if barred else 4)


class Rival(Struct, frozen=True):
    """A policy, and what makes it stop somebody: a guarantee, or that a job is short."""

    policy: str
    tenants: tuple[TenantSettings, ...] = ()


RIVALS = [
    *(Rival(name, BOTH) for name in ("aryl", "fifo", "sjf", "las", "yarn", "gandiva", "drf")),
    *(Rival(name) for name in ("las", "srtf", "srsf", "tiresias", "themis-simple")),
]


@each_row("is_stranger", [False, True])
@each_row("rival", RIVALS)
def test_nobody_is_stopped_for_a_job_that_needs_a_barred_gpu_too(
    rival: Rival, *, is_stranger: bool
) -> None:
    """Whoever runs goes on while one GPU of its node is barred; once it is well, room is made."""
    cell = Ward(rival.policy, {"n0-3": is_stranger}, tenants=rival.tenants, nodes=1)
    cell.ask(
        [
            Asked(tenant="rich", gpus=8, work_s=1e6),
            Asked(tenant="poor", at_s=150.0, gpus=8, work_s=60.0),
        ]
    )
    cell.run(until_s=WELL_AT_S - 1.0)
    counters = cell.engine.state.counters
    assert (counters.preemptions, counters.decisions_refused) == (0, 0)
    cell.run(until_s=WELL_AT_S + 3600.0)
    assert cell.engine.state.jobs[JobId("poor1")].state == JobState.SUCCEEDED


def moving(ill_at_s: float) -> tuple[float, set[tuple[int, int, int]]]:
    """When a job begins to move to n1, whose first half is barred from an instant on; and of each
    worker that GPUs are held for, its GPUs, those that it would free, and those barred by name."""
    cell = Ward("gandiva", {f"n1-{number}": False for number in range(4)}, ill_at_s=ill_at_s)
    short = Asked(tenant="a", gpus=8, work_s=200.0)
    cell.ask([Asked(tenant="a", gpus=8, work_s=1e6), short, replace(short, at_s=5.0, work_s=1e6)])
    began_s, seen = 0.0, set[tuple[int, int, int]]()
    while cell.loop.now_s < WELL_AT_S - 1.0:
        cell.run(until_s=cell.loop.now_s + LOOK_S)
        held = [worker for job in cell.engine.snapshot().jobs for worker in job.held]
        if began_s and not held:
            break
        for worker in held:
            began_s = began_s or cell.loop.now_s
            seen.add((worker.gpus, worker.freed_gpus, len(worker.barred_uuids)))
    return began_s, seen


@pytest.mark.slow
def test_of_a_job_that_moves_it_is_seen_what_its_place_to_be_would_free() -> None:
    """GPUs that are held for it fall ill while its workers still leave the others."""
    began_s, seen = moving(ill_at_s=WELL_AT_S - 1.0)
    assert began_s > 0.0
    assert seen == {(8, 8, 0)}
    _, seen = moving(ill_at_s=began_s + 0.5)
    assert seen == {(8, 8, 0), (8, 4, 0)}


bad = st.dictionaries(
    st.builds(
        lambda node, gpu: str(GpuUuid(f"{NodeName(f'n{node}')}-{gpu}")),
        st.integers(0, 1),
        st.integers(0, NODE_GPUS - 1),
    ),
    st.booleans(),
    min_size=1,
    max_size=4,
)
old = st.builds(
    Asked,
    tenant=st.sampled_from("abcc"),
    workers=st.sampled_from(((1, 1), (1, 1), (1, 3), (2, 2))),
    gpus=st.sampled_from((1, 2, 4, 4, 8)),
    work_s=st.sampled_from((300.0, 1e5, 1e5)),
)
new = st.builds(
    Asked,
    tenant=st.sampled_from("aab"),
    at_s=st.sampled_from((120.0, 130.0, 400.0, 800.0)),
    workers=st.sampled_from(((1, 1), (1, 2), (2, 2))),
    gpus=st.sampled_from((2, 4, 8, 8)),
    work_s=st.sampled_from((60.0, 600.0)),
)
stories = st.builds(
    lambda first, later: [*first, *later],
    st.lists(old, min_size=3, max_size=7),
    st.lists(new, min_size=1, max_size=4),
)
"""Jobs that fill the cell, and later ones before whom they may have to make room."""
TENANTS = (
    TenantSettings(name="p", guarantee_gpus=8),
    TenantSettings(name="a", parent="p", guarantee_gpus=6),
    TenantSettings(name="b", guarantee_gpus=8),
)


@pytest.mark.slow
@pytest.mark.parametrize("policy", FAMILIES)
@settings(max_examples=8, deadline=None, phases=(Phase.explicit, Phase.generate))
@given(
    bad=bad,
    jobs=stories,
    tenants=st.sampled_from(((), TENANTS)),
)
def test_somebody_starts_or_nobody_was_stopped(
    policy: str, bad: Bad, jobs: list[Asked], tenants: tuple[TenantSettings, ...]
) -> None:
    """Over many passes with GPUs that fall ill and get well, no stop was for nobody, and nothing
    that was decided had to be refused."""
    cell = Ward(policy, bad, tenants=tenants)
    cell.ask(jobs)
    cell.run(until_s=END_S)
    assert cell.vain == []
    assert cell.engine.state.counters.decisions_refused == 0
