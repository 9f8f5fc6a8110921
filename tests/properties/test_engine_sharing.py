"""Whatever is decided of shared GPUs, and whatever fails meanwhile: the books hold, jobs end."""

from __future__ import annotations

from hypothesis import given, settings
from msgspec import structs

from common.model import FINAL_JOB_STATES, NodeName
from coordinator.engine.state.events import JobCancelRequested
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import (
    Decision,
    Migrate,
    Placement,
    Preempt,
    Resume,
    Start,
    Suspend,
)
from coordinator.sim.run.cluster import Delays
from tests.draws import words, yes_or_no
from tests.harness.cluster.engine import EngineHarness, start

NODES = ("t0", "t1")
DELAYS = Delays(report_s=0.5, ready_s=1.0, start_s=2.0, suspend_s=0.5, resume_s=0.5, stop_s=3.0)
ACTIONS = (
    *("start", "beside", "beside", "suspend", "suspend", "resume", "resume", "migrate"),
    *("migrate_beside", "preempt", "cancel", "crash", "lose_journal", "swap", "deaf"),
)

PAUSES_S = (0.0, 0.3, 1.1, 4.0, 30.0)


def _step(word: int) -> tuple[str, int, int, bool, float]:
    """What, about which two jobs or nodes, packed or not, and how long it is waited then."""
    word, what = divmod(word, len(ACTIONS))
    word, one = divmod(word, 6)
    word, other = divmod(word, 6)
    word, is_packed = divmod(word, 2)
    return ACTIONS[what], one, other, bool(is_packed), PAUSES_S[word % len(PAUSES_S)]


LIVES = words(10, 40).map(lambda life: [_step(word) for word in life])


def placement_of(job: JobEntry, host: JobEntry | None, node: str) -> tuple[Placement, ...]:
    """On a host's GPUs, or on free ones of a node."""
    if host is None or not host.workers:
        return (Placement(node=NodeName(node), worker_count=1),)
    worker = next(iter(host.workers.values()))
    uuids = worker.gpu_uuids[: job.spec.gpus_per_worker]
    return (Placement(node=worker.node, worker_count=1, gpu_uuids=uuids),)


class Play:
    """One random life."""

    def __init__(self, *, has_delays: bool) -> None:
        self.harness = EngineHarness(inference=0, delays=DELAYS if has_delays else None)
        self.harness.wait(2.0)
        names = [f"j{number}" for number in range(6)]
        for number, name in enumerate(names):
            self.harness.submit(name, gpus_per_worker=(4, 8, 4)[number % 3], work_s=200.0)
        jobs = self.jobs()
        self.harness.decide(start(jobs[0], "t0"), start(jobs[1], "t1"))
        self.harness.wait(5.0)

    def jobs(self) -> list[JobEntry]:
        """All jobs, by id."""
        return [job for _, job in sorted(self.harness.engine.state.jobs.items())]

    def do(self, what: str, one: int, other: int, is_packed: bool) -> None:
        """One step."""
        jobs, node = self.jobs(), NODES[other % 2]
        if not jobs:
            return
        job, host = jobs[one % len(jobs)], jobs[other % len(jobs)]
        match what:
            case "cancel":
                event = JobCancelRequested(job_id=job.job_id, by="test")
                if other == 0:
                    self.harness.sim.handle(event)
            case "crash":
                self.harness.sim.nodes[NodeName(node)].crash()
                self.harness.wait(1.0)
                self.harness.sim.nodes[NodeName(node)].boot()
            case "lose_journal":
                self.harness.lose_journal()
            case "deaf":
                self.harness.toggle_deaf(NodeName(node))
            case _:
                self.harness.decide(*self.decisions(what, job, host, node, is_packed=is_packed))

    def decisions(
        self, what: str, job: JobEntry, host: JobEntry, node: str, *, is_packed: bool
    ) -> tuple[Decision, ...]:
        """What the policy says; most of it is refused."""
        suspend = Suspend(job_id=host.job_id, reason="random")
        resume = Resume(job_id=job.job_id, is_packed=is_packed, reason="random")
        begin: Start = structs.replace(
            start(job, node),
            placements=placement_of(job, host if what == "beside" else None, node),
            is_packed=is_packed,
        )
        move = Migrate(
            job_id=job.job_id,
            placements=placement_of(job, host if what == "migrate_beside" else None, node),
            is_packed=is_packed,
            reason="random",
        )
        made: dict[str, tuple[Decision, ...]] = {
            "start": (begin,),
            "beside": (begin,) if is_packed else (suspend, begin),
            "suspend": (suspend,),
            "resume": (resume,),
            "swap": (suspend, resume),
            "migrate": (move,),
            "migrate_beside": (move,),
            "preempt": (Preempt(job_id=job.job_id, reason="random"),),
        }
        return made[what]

    def end(self) -> None:
        """Let everybody end under decisions that share nothing."""
        for name in list(self.harness.deaf):
            self.harness.toggle_deaf(name)
        for round_number in range(60):
            if all(job.state in FINAL_JOB_STATES for job in self.jobs()):
                return
            waiting = [job for job in self.jobs() if not job.workers]
            self.harness.decide(*(start(job, NODES[round_number % 2]) for job in waiting))
            self.harness.wait(60.0)
        raise AssertionError([(job.job_id, job.state, job.workers) for job in self.jobs()])


@settings(max_examples=60, deadline=None)
@given(life=LIVES, has_delays=yes_or_no())
def test_random_lives_keep_the_books_and_end(
    life: list[tuple[str, int, int, bool, float]], has_delays: bool
) -> None:
    """Every event leaves the invariants whole, and nobody is stranded: each job ends."""
    play = Play(has_delays=has_delays)
    for what, one, other, is_packed, seconds in life:
        play.do(what, one, other, is_packed)
        play.harness.wait(seconds)
    play.end()
    held = [slot for node in NODES for slot in play.harness.node(node).gpus if slot.holder]
    assert not held
    assert not play.harness.engine.state.shared_nodes
