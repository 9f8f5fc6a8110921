"""Jobs that select nodes by labels and names: where they start and grow, and why they wait."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st
from msgspec.structs import replace

from common.model import JobChange, JobId, JobSpec, JobState, NodeName
from common.node_labels import RESET
from coordinator.engine.engine import decode_state
from coordinator.engine.jobs import node_selection
from coordinator.engine.state.events import JobChanged, OperatorAction, OperatorAsked
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.decisions import Placement, Resize
from coordinator.policies.contract.snapshot import JobView
from coordinator.sim.run.cluster import Delays
from coordinator.sim.run.simulation import Submission
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness, start, state


def cell() -> EngineHarness:
    """Three training nodes; t0 and t1 have the label that jobs here require."""
    harness = EngineHarness(training=3, inference=0, delays=Delays())
    label(harness, "t0", "rack=r7 nvlink")
    label(harness, "t1", "rack=r8")
    return harness


def label(harness: EngineHarness, node: str, text: str) -> None:
    """An operator sets labels."""
    harness.sim.handle(
        OperatorAsked(action=OperatorAction.LABEL, by="ops/a", target=node, value=text)
    )
    harness.settle()


def submit(harness: EngineHarness, name: str = "j", **fields: object) -> JobEntry:
    """A job of up to three workers that fill a node each."""
    spec = replace(make_spec(name, workers=(1, 3), gpus_per_worker=8), **fields)
    now_s = harness.sim.loop.now_s
    harness.sim.submit([Submission(at_s=now_s, job_id=JobId(name), spec=spec, work_s=1e6)])
    harness.settle()
    return harness.engine.state.jobs[JobId(name)]


def view(harness: EngineHarness, job: JobEntry) -> JobView:
    """The job as a policy sees it; the engine's derived views are checked as well."""
    assert harness.engine.check() == []
    return next(seen for seen in harness.engine.snapshot().jobs if seen.job_id == job.job_id)


def test_policies_see_the_nodes_that_do_not_fit_among_those_to_leave_alone() -> None:
    """Each field of a job takes its nodes away, and jobs that ask the same share one value."""
    harness = cell()
    asked: dict[str, tuple[dict[str, object], set[str]]] = {
        "a": ({"require": ("rack",)}, {"t2"}),
        "b": ({"require": ("rack=r7,r8", "nvlink")}, {"t1", "t2"}),
        "c": ({"exclude": ("nvlink|rack=r8",)}, {"t0", "t1"}),
        "d": ({"require_nodes": ("t2", "t9")}, {"t0", "t1"}),
        "e": ({"exclude_nodes": ("t2",)}, {"t2"}),
        "f": ({}, set()),
        "g": ({"require": ("rack",)}, {"t2"}),
    }
    jobs = {name: submit(harness, name, **fields) for name, (fields, _) in asked.items()}
    seen = {name: view(harness, job) for name, job in jobs.items()}
    assert {name: set(found.nodes.avoided) for name, found in seen.items()} == {
        name: nodes for name, (_, nodes) in asked.items()
    }
    assert seen["a"].nodes.avoided is seen["g"].nodes.avoided


def test_a_label_that_changes_counts_at_the_next_start_and_growth_alone() -> None:
    """A worker that runs stays where it is; a node without the label gets no further one."""
    harness = cell()
    job = submit(harness, require=("rack",))
    assert harness.refusals(start(job, "t2")) == ["t2 has no label rack, which the job requires"]
    harness.start(job, "t0")
    harness.wait(1.0)
    assert state(job) == JobState.RUNNING
    label(harness, "t0", "rack-")
    assert (state(job), set(view(harness, job).nodes.avoided)) == (JobState.RUNNING, {"t0", "t2"})

    def grow(name: str) -> Resize:
        added = (Placement(node=NodeName(name), worker_count=1, is_flexible=True),)
        return Resize(job_id=job.job_id, added=added, reason="room")

    assert harness.refusals(grow("t2")) == ["t2 has no label rack, which the job requires"]
    harness.decide(grow("t1"))
    assert {worker.node for worker in job.workers.values()} == {"t0", "t1"}


def test_a_person_changes_what_a_job_asks_of_nodes() -> None:
    """A field is replaced, an empty list takes it away, and the other fields stay."""
    harness = cell()
    job = submit(harness, require=("ib",), exclude_nodes=("t1",))

    def change(change: JobChange) -> set[NodeName]:
        harness.sim.handle(JobChanged(job_id=job.job_id, by="a/u", change=change))
        return set(view(harness, job).nodes.avoided)

    assert set(view(harness, job).nodes.avoided) == {"t0", "t1", "t2"}
    assert change(JobChange(require=("rack",))) == {"t1", "t2"}
    assert change(JobChange(exclude_nodes=())) == {"t2"}
    assert change(JobChange(require=())) == set()


def test_labels_of_an_operator_win_and_are_kept() -> None:
    """They survive a report and a snapshot; the order to reset leaves those of the agent."""
    harness = cell()
    node = harness.sim.nodes[NodeName("t0")]
    node.learn(labels={"rack": "r1", "disk": "nvme"})
    harness.settle()
    label(harness, "t0", "disk- ib")
    found = harness.node("t0").labels
    assert found.now == {"rack": "r7", "nvlink": "", "ib": ""}
    again = decode_state(harness.engine.encode_state()).nodes[NodeName("t0")].labels
    assert (again.now, again.ordered) == (found.now, found.ordered)
    label(harness, "t0", RESET)
    assert harness.node("t0").labels.now == {"rack": "r1", "disk": "nvme"}


def test_a_job_that_waits_says_how_many_nodes_fit_it() -> None:
    """One that no node fits says what is missing, and both count as they are now."""
    harness = cell()
    why = harness.engine.explain.why_never
    assert why(submit(harness, "a", require=("rack",)).job_id) == ()
    nobody = submit(harness, "b", require=("rack", "ib"))
    assert why(nobody.job_id) == ("can never run here: no node has ib, which it requires",)
    unknown = submit(harness, "c", require_nodes=("t9",))
    assert why(unknown.job_id) == ("can never run here: no node is called t9, as it requires",)
    both = submit(harness, "d", require=("nvlink",), exclude=("rack=r7",))
    [said] = why(both.job_id)
    assert said.endswith("no node fits what it asks of nodes (nvlink, not rack=r7)")
    label(harness, "t2", "ib rack=r9")
    assert why(nobody.job_id) == ()
    excluded = node_selection.Excluded(harness.engine.state.nodes.values())
    said = excluded.why_waiting(nobody.spec, {})
    assert said == "1 of 3 nodes fits what it asks of nodes (rack, ib); all busy, closed or serving"


TEXTS = st.lists(
    st.sampled_from(["rack=r7", "rack=r8", "rack-", "nvlink", "nvlink-", RESET]), max_size=8
)
TERMS = st.lists(st.sampled_from(["rack", "rack=r7", "nvlink|rack=r8"]), max_size=2)


@given(texts=TEXTS, require=TERMS, exclude=TERMS)
def test_nodes_kept_one_by_one_are_those_found_anew(
    texts: list[str], require: list[str], exclude: list[str]
) -> None:
    """Whatever labels come and go, the excluded nodes are those of a fresh look at all nodes."""
    harness = EngineHarness(training=2, inference=1)
    spec = make_spec("j", workers=(1, 1))
    spec = replace(spec, require=tuple(require), exclude=tuple(exclude))
    nodes = harness.engine.state.nodes
    kept = node_selection.Excluded(nodes.values())
    for number, text in enumerate(texts):
        kept.of(spec)
        name = list(nodes)[number % len(nodes)]
        label(harness, name, text)
        before = set(kept.of(spec))
        kept.note(name, nodes[name], (name,))
        is_other = before != _barred(harness, spec)
        assert bool(kept.take_changed()) == is_other
        assert set(kept.of(spec)) == _barred(harness, spec)


def _barred(harness: EngineHarness, spec: JobSpec) -> set[NodeName]:
    nodes = harness.engine.state.nodes.values()
    return {node.name for node in nodes if node_selection.why_not_on(spec, node)}
