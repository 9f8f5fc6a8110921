"""What a job names and a node does not find: the node's matter until a second one says the same."""

from __future__ import annotations

from msgspec.structs import replace

from common.faults import Fault
from common.model import JobState, NodeName, RetrySpec
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import OperatorAction, PassDue
from coordinator.engine.state.tables import JobEntry
from tests.harness.cluster.engine import state
from tests.harness.cluster.scripted_nodes import BACK_OFF_S, SETTINGS, BlackHole, Refusal
from tests.tables import each_row

WORKDIR = "workdir '/data/run' is not a directory on this node"
COMMAND = "command 'train' was not found on PATH '/usr/bin'"
NO_WORKDIR = Refusal(WORKDIR, Fault.JOB, "workdir")
NO_COMMAND = Refusal(COMMAND, Fault.JOB, "command")
COOLDOWN_S = SETTINGS.resize_cooldown_s


def cell_of(nodes: int) -> BlackHole:
    """Nodes that are well but for what a test says."""
    cell = BlackHole(nodes=nodes)
    cell.bad = set()
    return cell


def refuse(cell: BlackHole, job: JobEntry, *names: str, why: Refusal = NO_WORKDIR) -> None:
    """Nodes say that they cannot run the job's workers that are there; the others are gone."""
    for name in names:
        facts = [why.of(worker) for worker in job.workers.values() if worker.node == name]
        cell.report(name, *facts)
    for name in sorted({*names, *(worker.node for worker in job.workers.values())}):
        cell.report(name)


def refused_on(cell: BlackHole, job: JobEntry, why: Refusal = NO_WORKDIR) -> list[str]:
    """A pass, and every node that it placed the job on refuses it; which ones."""
    cell.handle(PassDue())
    names = sorted({worker.node for worker in job.workers.values()})
    refuse(cell, job, *names, why=why)
    return list(names)


def test_what_one_node_does_not_find_is_tried_on_another() -> None:
    """The path may be there: it costs the job nothing but the try, and its story names the node."""
    cell = cell_of(2)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    assert (job.counts.node_faults, job.counts.own_faults) == (1, 0)
    assert job.retry.avoid_nodes == ["t0"]
    assert job.error == f"{WORKDIR} (t0)"
    told = [line.reason for line in cell.engine.state.stories if line.subject == job.job_id]
    assert f"node fault: {WORKDIR} (t0)" in told
    cell.passes()
    assert (state(job), {w.node for w in job.workers.values()}) == (JobState.RUNNING, {"t1"})


def test_what_two_nodes_do_not_find_is_the_jobs_own_fault() -> None:
    """It ends after the second one, however many there are, and both are named."""
    cell = cell_of(4)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    assert refused_on(cell, job) == ["t1"]
    assert (state(job), job.attempt.number) == (JobState.FAILED, 2)
    assert (job.counts.node_faults, job.counts.own_faults) == (1, 1)
    assert job.error == f"{WORKDIR} (t0, t1)"


def test_two_nodes_that_miss_different_things_prove_nothing() -> None:
    """The third one says which of the two it is."""
    cell = cell_of(4)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    assert refused_on(cell, job, NO_COMMAND) == ["t1"]
    assert (state(job), job.counts.node_faults) == (JobState.PENDING, 2)
    assert refused_on(cell, job, NO_COMMAND) == ["t2"]
    assert (state(job), job.error) == (JobState.FAILED, f"{COMMAND} (t1, t2)")


def test_what_the_only_node_that_fits_does_not_find_is_the_jobs_own_fault() -> None:
    """There is nobody to ask; a node that takes nothing is nobody."""
    cell = cell_of(2)
    cell.operate(OperatorAction.CORDON, "t1")
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    assert (state(job), job.counts.own_faults) == (JobState.FAILED, 1)
    assert job.error == f"{WORKDIR} (t0; the job fits nowhere else)"


def test_where_every_node_misses_something_the_last_word_counts() -> None:
    """None is left that has not refused the job: nobody waits for one to change its mind."""
    cell = cell_of(2)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    assert refused_on(cell, job, NO_COMMAND) == ["t1"]
    assert (state(job), job.error) == (
        JobState.FAILED, f"{COMMAND} (t1; the job fits nowhere else)",
    )  # fmt: skip


def test_two_workers_on_one_node_say_it_once() -> None:
    """Both of a gang's workers miss the path there; it is tried on the other node."""
    cell = cell_of(2)
    job = cell.submit("j", workers=2, gpus=1)
    cell.handle(PassDue())
    assert [worker.node for worker in job.workers.values()] == ["t0", "t0"]
    refuse(cell, job, "t0")
    assert (state(job), job.counts.node_faults, job.counts.own_faults) == (JobState.PENDING, 1, 0)


def test_one_node_that_says_it_twice_is_still_one() -> None:
    """The other one is busy: the job waits longer each time, and nobody calls it wrong."""
    cell = cell_of(2)
    busy = cell.submit("busy")
    cell.passes()
    assert {worker.node for worker in busy.workers.values()} == {"t0"}
    job = cell.submit("j")
    for faults in (1, 2, 3):
        assert refused_on(cell, job) == ["t1"]
        assert (state(job), job.counts.node_faults, job.counts.own_faults) == (
            JobState.PENDING, faults, 0,
        )  # fmt: skip
        cell.handle(PassDue())
        assert job.workers == {}
        cell.now_s += BACK_OFF_S * 2 ** (faults - 1)
        cell.handle(PassDue())


@each_row("names", [("t0", "t1"), ("t1", "t0")])
@each_row("restarts", [0, 1])
def test_two_nodes_of_one_gang_that_say_the_same_are_two(
    names: tuple[str, str], restarts: int
) -> None:
    """The second word comes of a worker that was ordered to stop for the first."""
    cell = cell_of(4)
    job = cell.submit("j", workers=2)
    job.spec = replace(job.spec, retry=RetrySpec(max_restarts=restarts))
    cell.handle(PassDue())
    assert {worker.node for worker in job.workers.values()} == {"t0", "t1"}
    refuse(cell, job, *names)
    assert (job.counts.node_faults, job.counts.own_faults) == (0, 1)
    assert state(job) == (JobState.PENDING if restarts else JobState.FAILED)
    assert job.error == f"{WORKDIR} ({names[0]}, {names[1]})"


def test_a_gang_of_which_one_node_misses_a_path_starts_elsewhere() -> None:
    """Its peers, which were told to stop, say nothing of their own."""
    cell = cell_of(3)
    job = cell.submit("j", workers=2)
    cell.handle(PassDue())
    refuse(cell, job, "t1")
    assert (state(job), job.counts.node_faults, job.counts.own_faults) == (JobState.PENDING, 1, 0)
    cell.passes()
    assert {w.node for w in job.workers.values()} == {"t0", "t2"}


def test_a_job_that_was_preempted_is_called_wrong_by_nobody() -> None:
    """It ends for another reason than the refusal that comes meanwhile."""
    cell = cell_of(3)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    cell.handle(PassDue())
    [worker] = job.workers.values()
    cell.operate(OperatorAction.DRAIN, worker.node)
    refuse(cell, job, worker.node)
    assert (state(job), job.counts.node_faults, job.counts.own_faults) == (JobState.PENDING, 1, 0)


def test_a_job_that_ran_since_begins_anew() -> None:
    """What a node did not find weeks ago and what another does not find now are two matters."""
    cell = cell_of(3)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    cell.passes()
    assert {w.node for w in job.workers.values()} == {"t1"}
    cell.boots[NodeName("t1")] = "b2"
    cell.report("t1")
    assert refused_on(cell, job) == ["t2"]
    assert (state(job), job.counts.own_faults) == (JobState.PENDING, 0)


def test_a_job_that_runs_is_not_ended_by_nodes_that_it_could_grow_onto() -> None:
    """It goes on with what it has, and does not try the same node again and again."""
    cell = cell_of(3)
    job = cell.submit("j", most=3)
    for name in ("t1", "t2"):
        cell.operate(OperatorAction.CORDON, name)
    cell.passes()
    assert job.running_workers == 1
    for name in ("t1", "t2"):
        cell.operate(OperatorAction.UNCORDON, name)
    cell.now_s += COOLDOWN_S
    cell.handle(PassDue())
    assert len(job.workers) == 3
    for name in ("t1", "t2"):
        here = [worker for worker in job.workers.values() if worker.node == name]
        assert here
        assert all(worker.is_flexible for worker in here)
        cell.report(name, *map(NO_WORKDIR.of, here))
        cell.report(name)
    assert (state(job), job.running_workers) == (JobState.RUNNING, 1)
    assert (job.counts.own_faults, job.counts.node_faults) == (0, 2)
    assert job.retry.avoid_nodes == ["t1", "t2"]
    cell.now_s += 10 * COOLDOWN_S
    cell.handle(PassDue())
    assert (state(job), len(job.workers)) == (JobState.RUNNING, 1)


def test_what_was_refused_outlives_the_leader() -> None:
    """The second node's word counts for the next one too."""
    cell = cell_of(3)
    job = cell.submit("j")
    assert refused_on(cell, job) == ["t0"]
    cell.engine = Engine(SETTINGS, decode_state(cell.engine.encode_state()))
    again = cell.engine.state.jobs[job.job_id]
    assert refused_on(cell, again) == ["t1"]
    assert (state(again), again.counts.own_faults) == (JobState.FAILED, 1)
