"""Jobs that run on nodes which nobody is started on: what healthy nodes have is for the others."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial

from common.model import JobId, NodeName, Pool
from coordinator.engine.state.events import OperatorAction, OperatorAsked
from coordinator.engine.state.settings import EngineSettings, TenantSettings
from coordinator.policies.contract.decisions import Decision, Start
from coordinator.sim.run.cluster import NodeSpec
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.simulation import Simulation, Submission
from tests.builders import make_spec
from tests.policies.families import FAMILIES
from tests.tables import each_row

CUT_S = 200.0
SOON_S = 720.0
"""All of `n1` is free from about 660 s; some policies look at it once a minute."""
TENANTS = (TenantSettings(name="x", guarantee_gpus=2), TenantSettings(name="y", guarantee_gpus=4))


class Cut(Simulation):
    """`n0` is full of a long gang when it is cut off; 1 of the 4 GPUs of `n1` is free until 660 s,
    and `late`, a job of one GPU, comes at 260 s."""

    def __init__(self, policy: str, tenants: tuple[TenantSettings, ...]) -> None:
        nodes = [
            NodeSpec(name=NodeName(name), home_pool=Pool.TRAINING, gpu_type="V100", gpus=4)
            for name in ("n0", "n1")
        ]
        super().__init__(EngineSettings(policy=policy, tenants=tenants), nodes, check=True)
        self.starts: dict[str, float] = {}
        self.hear = self._heard
        self.asks("long", "x", 0.0, 4, 20000.0)
        self.asks("short", "y", 60.0, 3, 600.0)
        self.asks("late", "y", 260.0, 1, 600.0)

    def asks(self, name: str, tenant: str, at_s: float, workers: int, runs_s: float) -> None:
        """A rigid job of one GPU a worker."""
        spec = make_spec(name, workers=(workers, workers), expected_runtime_s=runs_s)
        work_s = workers * runs_s
        job = Submission(at_s=at_s, job_id=JobId(name), spec=spec, work_s=work_s, tenant=tenant)
        self.submit([job])

    def _heard(self, decisions: Sequence[Decision]) -> None:
        for each in decisions:
            if isinstance(each, Start):
                self.starts.setdefault(str(each.job_id), self.loop.now_s)


@each_row("tenants", [(), TENANTS], ids=["alone", "tenants"])
@each_row("is_lost", [True, False], ids=["lost", "cordoned"])
@each_row("policy", FAMILIES)
def test_a_job_starts_on_a_healthy_node_whatever_runs_on_one_that_takes_nobody(
    policy: str, is_lost: bool, tenants: tuple[TenantSettings, ...]
) -> None:
    """What a gang holds on a node that is lost or cordoned is not taken from other nodes."""
    played = Cut(policy, tenants)
    if is_lost:
        played.crash([Crash(node=NodeName("n0"), at_s=CUT_S, down_s=4000.0)])
    else:
        cordon = OperatorAsked(
            action=OperatorAction.CORDON, by="op", target="n0", reason="looked at"
        )
        played.loop.at(CUT_S, partial(played.handle, cordon))
    played.begin()
    played.loop.run(3000.0)
    assert played.starts["late"] <= SOON_S
