"""A node that was lent and has not reported since counts as gone from its service."""

from __future__ import annotations

from common.model import JobId, Mode, NodeName, Pool
from coordinator.engine.state.events import LoadMeasured, LoanPassDue
from coordinator.engine.state.settings import EngineSettings, ServiceSettings
from coordinator.sim.run.cluster import Delays, NodeSpec
from coordinator.sim.run.simulation import Simulation, Submission
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import CHAT


def submission(name: str, *, gpus: int, at_s: float, work_s: float) -> Submission:
    """A job of one worker."""
    spec = make_spec(name, gpus_per_worker=gpus, expected_runtime_s=work_s)
    return Submission(at_s=at_s, job_id=JobId(name), spec=spec, work_s=work_s)


def cell() -> Simulation:
    """Three nodes, of which the load of 15 leaves one spare; they report a second late."""
    service = ServiceSettings(
        name=CHAT, capacity_per_node=10.0, mode=Mode.ACT, headroom_ratio=0.0, hold_off_s=0.0
    )
    nodes = [
        NodeSpec(
            name=NodeName(f"i{number}"),
            home_pool=Pool.INFERENCE,
            gpu_type="H100",
            gpus=gpus,
            service=CHAT,
        )
        for number, gpus in enumerate((2, 8, 8))
    ]
    sim = Simulation(EngineSettings(services=(service,)), nodes, delays=Delays(report_s=1.0))
    sim.submit(
        [
            submission("first", gpus=2, at_s=2.0, work_s=5000.0),
            submission("wide", gpus=8, at_s=10.5, work_s=1000.0),
        ]
    )
    return sim


def measure(sim: Simulation, load: float) -> None:
    """A load, and a loan pass that looks at it."""
    sim.handle(LoadMeasured(service=CHAT, load=load))
    sim.handle(LoanPassDue())


def lent(sim: Simulation) -> list[str]:
    """The nodes with a lease."""
    return [node.name for node in sim.engine.state.nodes.values() if node.lease is not None]


def test_no_second_node_is_lent_in_place_of_one_that_has_not_left_yet() -> None:
    """A pass that comes before its report lends no other one, and proposes it no more."""
    sim = cell()
    for at_s in (10.0, 10.6):
        sim.loop.at(at_s, lambda: measure(sim, 15.0))
    sim.run(until_s=10.8)
    assert lent(sim) == ["i0"]
    assert sim.engine.state.counters.decisions_refused == 0


def test_a_loan_is_called_back_before_its_node_reports() -> None:
    """The load rises within that second: the node stays home."""
    sim = cell()
    sim.loop.at(10.0, lambda: measure(sim, 15.0))
    sim.loop.at(10.6, lambda: measure(sim, 25.0))
    sim.run(until_s=10.8)
    assert lent(sim) == []
    assert sim.engine.state.counters.decisions_refused == 0
