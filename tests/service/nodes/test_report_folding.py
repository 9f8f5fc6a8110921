"""Whatever agents report, the coordinator can live with; only news enters, with its age."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from common import subjects
from common.errors import ProtocolError
from common.messages import (
    GpuHealth,
    GpuReport,
    InferenceReport,
    NodeReport,
    OrderPhase,
    WorkerOrder,
    WorkerPhase,
    WorkerReport,
    encode,
)
from common.model import (
    MAX_INT,
    Checkpoint,
    GpuUuid,
    JobId,
    JobSpec,
    Lease,
    LeaseId,
    NodeName,
    NodeRole,
    Pool,
    Progress,
    ServiceName,
    StopReason,
    WorkerKey,
)
from coordinator.engine.engine import Engine
from coordinator.engine.state.events import (
    Event,
    GpuFact,
    JobSubmitted,
    LeaderStarted,
    LoanPassDue,
    NodeReported,
    NodeSilent,
    OrdersRecovered,
    PassDue,
    ProgressReported,
    WorkerFact,
)
from coordinator.service.nodes.report_folding import Folder
from coordinator.service.nodes.report_validation import MAX_COUNT, node_report
from tests.harness.cluster.coordinator import CELL, CHAT, make_settings, make_spec
from tests.service.wire import example
from tests.tables import each_row

LOAD_PERIOD_S = 2.0
LOST_AFTER_S = 5.0

INTS = st.sampled_from([0, 1, -1, 5, 2**63 - 1, -(2**63)])
NATURALS = st.sampled_from([0, 1, 2, MAX_INT])
COUNTS = st.sampled_from([0.0, 1.0, 5.0, 1e9, MAX_COUNT])
KEYS = st.builds(
    WorkerKey,
    st.sampled_from([JobId("j0"), JobId("j1"), JobId("jx")]),
    st.sampled_from([1, 2, 2**40]),
    st.sampled_from([0, 1, 2**40]),
)
WORKERS = st.builds(
    WorkerReport,
    key=KEYS,
    phase=st.sampled_from(list(WorkerPhase)),
    gpu_uuids=st.just(()),
    endpoint=st.sampled_from(["", "a:1"]),
    running_s=COUNTS,
    exit_code=st.none() | INTS,
    stop_reason=st.none() | st.sampled_from(list(StopReason)),
    progress=st.none() | st.builds(Progress, step=INTS, total_steps=st.none() | INTS),
    checkpoint=st.none()
    | st.builds(Checkpoint, step=INTS, path=st.just("/x"), is_verified=st.booleans()),
)


@st.composite
def reports(draw: st.DrawFn) -> NodeReport:
    """A report that an agent may send, however foolish; GPUs carry their node's name."""
    node = draw(st.sampled_from(["n0", "n1"]))
    gpus = draw(st.lists(st.sampled_from(["g0", "g1", "g2"]), unique=True))
    return NodeReport(
        node=node,
        boot_id=draw(st.sampled_from(["a", "b"])),
        sequence=draw(NATURALS),
        home_pool=draw(st.sampled_from(list(Pool))),
        role=draw(st.sampled_from([role for role in NodeRole if role != NodeRole.LOST])),
        epoch=draw(NATURALS),
        generation=draw(NATURALS),
        instance="one",
        period_s=1.0,
        service=draw(st.sampled_from([None, CHAT, "other"])),
        lease=draw(
            st.none()
            | st.builds(
                Lease,
                lease_id=st.sampled_from([LeaseId("l1"), LeaseId("lx")]),
                service=st.sampled_from([CHAT, ServiceName("other")]),
                ttl_s=COUNTS,
            )
        ),
        gpus=tuple(
            GpuReport(
                uuid=GpuUuid(node + name),
                index=0,
                gpu_type=draw(st.sampled_from(["H100", "A100"])),
                memory_total_bytes=0,
                health=draw(st.sampled_from(list(GpuHealth))),
            )
            for name in gpus
        ),
        inference=draw(
            st.none()
            | st.builds(
                InferenceReport, running_count=COUNTS, waiting_count=COUNTS, success_total=COUNTS
            )
        ),
        workers=tuple(draw(st.lists(WORKERS, max_size=3, unique_by=lambda worker: worker.key))),
    )


ORDERS = st.builds(
    WorkerOrder,
    key=KEYS,
    spec=st.just(make_spec("o", workers=(1, 2), gpus_per_worker=1)),
    tenant=st.just("t"),
    user=st.just("u"),
    submitted_at_s=COUNTS,
    gpu_uuids=st.sampled_from([(), ("n0g0",), ("n0g1",), ("n1g0",), ("n0g0", "n0g1")]),
    gpu_type=st.sampled_from(["H100", ""]),
    is_flexible=st.booleans(),
    phase=st.sampled_from(list(OrderPhase)),
    worker_count=NATURALS,
)
LEDGERS = st.builds(
    OrdersRecovered,
    node=st.sampled_from([NodeName("n0"), NodeName("n1")]),
    orders=st.lists(ORDERS, max_size=3).map(tuple),
    began_ago_s=st.dictionaries(KEYS.map(str), COUNTS, max_size=3),
)
SUBMITS = st.builds(
    JobSubmitted,
    job_id=st.sampled_from([JobId("j0"), JobId("j1")]),
    spec=st.just(make_spec("s", workers=(1, 2), gpus_per_worker=1)),
    tenant=st.just("t"),
    user=st.just("u"),
)


@given(steps=st.lists(st.one_of(reports(), reports(), LEDGERS, SUBMITS), max_size=12))
@settings(max_examples=150, deadline=None)
def test_no_report_and_no_ledger_breaks_the_engine(
    steps: list[NodeReport | OrdersRecovered | JobSubmitted],
) -> None:
    """Reports and ledgers in any order, with passes between: no exception, no broken invariant."""
    engine = Engine(make_settings().engine)
    folder = make_folder()
    now_s = 1000.0

    def handle(event: Event) -> None:
        engine.handle(event, now_s=now_s)
        assert engine.check() == []

    handle(LeaderStarted(epoch=1, holder="x", settings=make_settings().engine))
    for step in steps:
        now_s += 1.5
        if isinstance(step, NodeReport):
            subject = subjects.node_report(CELL, step.node)
            facts = folder.fold(node_report(encode(step), subject), now_s=now_s)
            if facts is not None:
                handle(facts)
        else:
            handle(step)
        for event in folder.due(now_s=now_s):
            handle(event)
        handle(LoanPassDue())
        handle(PassDue())
    engine.encode_state()


def make_order(node: str, *gpus: str, attempt: int = 1, spec: JobSpec | None = None) -> WorkerOrder:
    """What a ledger holds of job `j`."""
    return WorkerOrder(
        key=WorkerKey(JobId("j"), attempt, 0),
        spec=spec or make_spec("j", gpus_per_worker=2),
        tenant="t",
        user="u",
        submitted_at_s=1.0,
        gpu_uuids=tuple(GpuUuid(node + gpu) for gpu in gpus),
        gpu_type="H100",
        is_flexible=False,
        phase=OrderPhase.RUN,
        worker_count=1,
    )


def hold(engine: Engine, node: str, *attempts: int, gpus: tuple[str, ...] = ("g0", "g1")) -> None:
    """A training node reports running workers of job `j` by attempt."""
    engine.handle(
        NodeReported(
            node=NodeName(node),
            boot_id="b",
            home_pool=Pool.TRAINING,
            role=NodeRole.TRAINING,
            epoch=1,
            generation=1,
            gpus=tuple(GpuFact(GpuUuid(node + gpu), "H100") for gpu in gpus),
            workers=tuple(
                WorkerFact(key=WorkerKey(JobId("j"), attempt, 0), phase=WorkerPhase.RUNNING)
                for attempt in attempts
            ),
        ),
        now_s=10.0,
    )


@pytest.mark.parametrize(
    "gpus", [(), ("g0",), ("g0", "g7")], ids=["no GPUs", "too few", "GPUs of nowhere"]
)
def test_a_ledger_whose_worker_has_not_its_gpus_is_not_adopted(gpus: tuple[str, ...]) -> None:
    """It stays unknown: nothing is placed on the node, and nothing there is stopped."""
    engine = Engine(make_settings().engine)
    hold(engine, "t0", 1)
    recovered = OrdersRecovered(node=NodeName("t0"), orders=(make_order("t0", *gpus),))
    engine.handle(recovered, now_s=11.0)
    node = engine.state.nodes[NodeName("t0")]
    assert engine.state.jobs == {}
    assert node.ledger.unknown_workers == [WorkerKey(JobId("j"), 1, 0)]
    assert (node.ledger.stale_stops, node.ledger.acknowledged) == ([], [])
    assert engine.check() == []


def test_a_ledger_does_not_bring_back_an_attempt_that_is_over() -> None:
    """Two nodes hold the job; the older attempt's ledger comes last and is not adopted."""
    engine = Engine(make_settings().engine)
    hold(engine, "t0", 1)
    hold(engine, "t1", 2)
    for node, attempt in (("t1", 2), ("t0", 1)):
        order = make_order(node, "g0", "g1", attempt=attempt)
        engine.handle(OrdersRecovered(node=NodeName(node), orders=(order,)), now_s=11.0)
    job = engine.state.jobs[JobId("j")]
    assert (job.attempt.number, [w.node for w in job.workers.values()]) == (2, ["t1"])
    assert engine.check() == []
    hold(engine, "t0", 1)
    assert engine.state.nodes[NodeName("t0")].ledger.stale_stops == [WorkerKey(JobId("j"), 1, 0)]


# --- folding --------------------------------------------------------------------------------


def make_folder() -> Folder:
    """Short windows."""
    return Folder(
        lost_after_s=LOST_AFTER_S, load_period_s=LOAD_PERIOD_S, progress_period_s=LOAD_PERIOD_S
    )


SERVING = msgspec.convert(
    {
        **example(NodeReport),
        "node": "i0",
        "role": "serving",
        "service": CHAT,
        "workers": [],
    },
    NodeReport,
)


def make_report(sequence: int, **changes: object) -> NodeReport:
    """A serving node's report without workers."""
    return msgspec.structs.replace(SERVING, sequence=sequence, **changes)


def make_inference(success_total: float, *, in_flight: float = 0.0) -> InferenceReport:
    """A metrics page."""
    return InferenceReport(running_count=in_flight, waiting_count=0.0, success_total=success_total)


def test_only_news_enters_the_engine() -> None:
    """A report that differs in telemetry alone says nothing; one that differs in facts does."""
    folder = make_folder()
    assert folder.fold(make_report(1), now_s=0.0) is not None
    assert folder.fold(make_report(2, lease_remaining_s=5.0), now_s=1.0) is None
    assert folder.fold(make_report(3, generation=9), now_s=2.0) is not None
    folder.forget_node(NodeName("i0"))
    assert folder.fold(make_report(4, generation=9), now_s=3.0) is not None


def test_a_report_that_was_overtaken_is_dropped() -> None:
    """Within one boot the higher sequence wins; a new boot begins again."""
    folder = make_folder()
    folder.fold(make_report(5), now_s=0.0)
    assert folder.fold(make_report(4, generation=9), now_s=1.0) is None
    assert (folder.stale_count, folder.heard_at_s[NodeName("i0")]) == (1, 0.0)
    assert folder.fold(make_report(1, boot_id="other"), now_s=2.0) is not None


def test_silence_is_said_once_and_ends_with_a_report() -> None:
    """A node that speaks again says all of its facts, although they did not change."""
    folder = make_folder()
    folder.fold(make_report(1), now_s=0.0)

    def silences(now_s: float) -> list[Event]:
        return [e for e in folder.due(now_s=now_s) if isinstance(e, NodeSilent)]

    assert silences(LOST_AFTER_S) == []
    assert [e.node for e in silences(LOST_AFTER_S + 1) if isinstance(e, NodeSilent)] == ["i0"]
    assert silences(LOST_AFTER_S + 2) == []
    assert folder.fold(make_report(2), now_s=LOST_AFTER_S + 3) is not None
    assert len(silences(3 * LOST_AFTER_S)) == 1


def test_progress_is_that_of_the_newest_attempt() -> None:
    """One fact per job; an old attempt that still reports does not take it back."""
    good = msgspec.convert(example(NodeReport), NodeReport).workers[0]
    folder = make_folder()
    for sequence, (attempt, step) in enumerate(((1, 90), (2, 3), (1, 95)), start=1):
        worker = msgspec.structs.replace(
            good,
            key=WorkerKey(JobId("j"), attempt, 0),
            progress=Progress(step=step),
            checkpoint=None,
        )
        folder.fold(make_report(1, node=f"t{sequence}", workers=(worker,)), now_s=0.0)
    said = [e for e in folder.due(now_s=LOAD_PERIOD_S) if isinstance(e, ProgressReported)]
    assert [(e.attempt, e.progress) for e in said] == [(2, Progress(step=3))]
    again = [e for e in folder.due(now_s=3 * LOAD_PERIOD_S) if isinstance(e, ProgressReported)]
    assert again == []


def test_a_report_beyond_counting_is_refused() -> None:
    """The largest count that a float still counts is taken, the next one is not."""
    subject = subjects.node_report(CELL, "i0")
    node_report(encode(make_report(1, inference=make_inference(MAX_COUNT))), subject)
    with pytest.raises(ProtocolError, match="success_total"):
        node_report(encode(make_report(1, inference=make_inference(2 * MAX_COUNT))), subject)


NODE = NodeName("t0")
PROGRESS_PERIOD_S = 10.0
SAVED = Checkpoint(step=5, path="/c", is_verified=True)


def folder_without_losses() -> Folder:
    """Nobody is lost."""
    return Folder(lost_after_s=1e9, load_period_s=1e9, progress_period_s=PROGRESS_PERIOD_S)


def worker(phase: WorkerPhase, *, saved_ago_s: float, ended_ago_s: float = 0.0) -> WorkerReport:
    """What a node says of a worker that has saved."""
    return WorkerReport(
        key=WorkerKey(JobId("j"), 1, 0),
        phase=phase,
        gpu_uuids=(),
        progress=Progress(step=7),
        checkpoint=SAVED,
        saved_ago_s=saved_ago_s,
        ended_ago_s=ended_ago_s,
    )


def report_of(sequence: int, *workers: WorkerReport) -> NodeReport:
    """A node's report."""
    plain = {**example(NodeReport), "node": NODE, "sequence": sequence, "workers": []}
    return msgspec.structs.replace(msgspec.convert(plain, NodeReport), workers=workers)


def ages(facts: NodeReported | None) -> tuple[float, float]:
    """(saved, ended) so long before the fact."""
    assert facts is not None
    [fact] = facts.workers
    return fact.saved_ago_s, fact.ended_ago_s


def test_an_end_enters_with_its_age_and_once() -> None:
    """The same end is older in the next report, which is no news of it."""
    folder = folder_without_losses()
    gone = worker(WorkerPhase.EXITED, saved_ago_s=9.0, ended_ago_s=4.0)
    assert ages(folder.fold(report_of(1, gone), now_s=0.0)) == (9.0, 4.0)
    older = worker(WorkerPhase.EXITED, saved_ago_s=10.0, ended_ago_s=5.0)
    assert folder.fold(report_of(2, older), now_s=1.0) is None


def test_what_is_said_again_has_grown_older() -> None:
    """Whoever takes the lead may have heard a report some time ago."""
    folder = folder_without_losses()
    gone = report_of(1, worker(WorkerPhase.EXITED, saved_ago_s=9.0, ended_ago_s=4.0))
    folder.fold(gone, now_s=0.0)
    assert ages(folder.say_again(gone, now_s=6.0)) == (15.0, 10.0)


def test_a_save_is_told_with_its_age_of_then() -> None:
    """Progress waits for its period, and a save that was told is not told again for its age."""
    folder = folder_without_losses()
    folder.fold(report_of(1, worker(WorkerPhase.RUNNING, saved_ago_s=2.0)), now_s=0.0)
    [first] = folder.due(now_s=PROGRESS_PERIOD_S)
    assert isinstance(first, ProgressReported)
    assert (first.checkpoint, first.saved_ago_s) == (SAVED, 2.0 + PROGRESS_PERIOD_S)
    folder.fold(report_of(2, worker(WorkerPhase.RUNNING, saved_ago_s=15.0)), now_s=13.0)
    assert folder.due(now_s=2 * PROGRESS_PERIOD_S) == []


def test_a_save_keeps_its_own_age_when_another_worker_is_further() -> None:
    """The progress is that of the furthest one, the checkpoint of the one that has one."""
    folder = folder_without_losses()
    further = msgspec.structs.replace(
        worker(WorkerPhase.RUNNING, saved_ago_s=0.0),
        key=WorkerKey(JobId("j"), 1, 1),
        progress=Progress(step=8),
        checkpoint=None,
    )
    folder.fold(report_of(1, worker(WorkerPhase.RUNNING, saved_ago_s=2.0), further), now_s=0.0)
    [said] = folder.due(now_s=PROGRESS_PERIOD_S)
    assert isinstance(said, ProgressReported)
    assert (said.progress, said.checkpoint) == (Progress(step=8), SAVED)
    assert said.saved_ago_s == 2.0 + PROGRESS_PERIOD_S


def test_the_age_of_a_way_home_is_no_news_and_grows() -> None:
    """Each report says how long ago it was over, once it was."""
    folder = folder_without_losses()
    plain = msgspec.structs.replace(report_of(1), home_ago_s=None)
    old = folder.fold(plain, now_s=0.0)
    assert old is not None
    assert old.home_ago_s is None
    home = msgspec.structs.replace(plain, sequence=2, stage_durations_s={"exit": 1.0})
    home = msgspec.structs.replace(home, home_ago_s=2.0)
    told = folder.fold(home, now_s=1.0)
    assert told is not None
    assert told.home_ago_s == 2.0
    later = msgspec.structs.replace(home, sequence=3, home_ago_s=3.0)
    assert folder.fold(later, now_s=2.0) is None
    assert folder.say_again(later, now_s=6.0).home_ago_s == 7.0


def test_a_ledger_comes_with_the_age_of_each_start_that_its_node_knows() -> None:
    """By the last report, which is older by now; no job runs for ages, or for ever."""
    folder = folder_without_losses()
    assert folder.began_ago_s(NODE, now_s=0.0) == {}
    plain = worker(WorkerPhase.RUNNING, saved_ago_s=0.0)
    told = [
        msgspec.structs.replace(
            plain, key=WorkerKey(JobId("j"), 1, index), running_s=running_s, ended_ago_s=ended_ago_s
        )
        for index, (running_s, ended_ago_s) in enumerate(
            [(400.0, 0.0), (0.0, 0.0), (300.0, 50.0), (float("inf"), 0.0), (1e12, 0.0)]
        )
    ]
    folder.fold(report_of(1, *told), now_s=10.0)
    assert folder.began_ago_s(NODE, now_s=12.0) == {"j.1.0": 402.0, "j.1.2": 352.0}


KEY = WorkerKey(JobId("j"), 1, 0)
BUSY = "GPU GPU-0 is used by process 4242"


def report_of_waits(
    sequence: int, error: str, phase: WorkerPhase = WorkerPhase.RESERVING
) -> NodeReport:
    """A training node that holds one worker."""
    return NodeReport(
        node="t0",
        boot_id="b",
        sequence=sequence,
        home_pool=Pool.TRAINING,
        role=NodeRole.TRAINING,
        epoch=1,
        generation=1,
        instance="one",
        period_s=1.0,
        workers=(WorkerReport(key=KEY, phase=phase, gpu_uuids=(), error=error),),
    )


def folder() -> Folder:
    """One that has heard the node wait for a process."""
    found = Folder(lost_after_s=9.0, load_period_s=9.0, progress_period_s=9.0)
    facts = found.fold(report_of_waits(1, BUSY), now_s=1.0)
    assert facts is not None
    assert [worker.error for worker in facts.workers] == [BUSY]
    return found


@each_row(
    ("error", "phase"),
    [
        ("", WorkerPhase.RESERVING),
        ("GPU GPU-0 has 700 MiB in use", WorkerPhase.RESERVING),
        (BUSY, WorkerPhase.REFUSED),
        ("", WorkerPhase.READY),
    ],
)
def test_another_reason_is_news(error: str, phase: WorkerPhase) -> None:
    """Also that there is none any more."""
    facts = folder().fold(report_of_waits(2, error, phase), now_s=2.0)
    assert facts is not None
    assert [worker.error for worker in facts.workers] == [error]


def test_the_same_reason_with_other_numbers_is_no_news() -> None:
    """Memory that is freed bit by bit would fill the journal, one record a second."""
    found = folder()
    assert found.fold(report_of_waits(2, "GPU GPU-0 is used by process 4243"), now_s=2.0) is None
    assert found.fold(report_of_waits(3, "GPU GPU-0 has 700 MiB in use"), now_s=3.0) is not None
    assert found.fold(report_of_waits(4, "GPU GPU-0 has 650 MiB in use"), now_s=4.0) is None


def test_what_a_running_worker_has_to_say_is_its_own_matter() -> None:
    """Only what ends or begins is a fact for scheduling."""
    facts = folder().fold(report_of_waits(2, "noise", WorkerPhase.RUNNING), now_s=2.0)
    assert facts is not None
    assert [worker.error for worker in facts.workers] == [""]
