"""Saved states of earlier versions are read as they were meant; those of later ones are refused."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.errors import ProtocolError
from common.model import (
    Checkpoint,
    GpuUuid,
    JobId,
    JobSpec,
    JobState,
    LeaseId,
    NodeName,
    NodeRole,
    Pool,
    Progress,
    ServiceName,
    StopReason,
    WorkerKey,
    WorkerRange,
)
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.job_groups import (
    AttemptEntry,
    EndedWorker,
    EndedWorkers,
    JobCounts,
    SaveState,
    Suspension,
    WaitEntry,
    WorkClock,
    WorkEstimate,
)
from coordinator.engine.state.node_groups import (
    Contact,
    Cordon,
    DesiredEntry,
    FailedStarts,
    Homecoming,
    HungStart,
    LedgerEntry,
    LeftReservation,
)
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import (
    STATE_VERSION,
    ClusterState,
    GpuSlot,
    JobEntry,
    NodeEntry,
    WorkerEntry,
)

VERSION_1 = Path(__file__).parents[2] / "data" / "state" / "1.msgpack"
"""Written by the last coordinator of version 1: each field that moved has a value of its own."""
JOB, NODE = JobId("j1"), NodeName("t0")


def job() -> JobEntry:
    """The job in that state."""
    return JobEntry(
        job_id=JOB,
        spec=JobSpec(name="train", command=("true",), workers=WorkerRange(min=1, max=2)),
        tenant="team",
        user="ada",
        submitted_at_s=1.0,
        number=1,
        state=JobState.SUSPENDED,
        attempt=AttemptEntry(
            number=3,
            gpu_type="A100",
            endpoint="t0:29500",
            next_worker_index=4,
            gang_deadline_s=32.0,
            ran_at_s=31.0,
            start_step=5,
            succeeded_workers=[1],
            is_packed=True,
            packed_speed_ratio=0.5,
            awaited_nodes=[NodeName("t1")],
        ),
        workers={
            0: WorkerEntry(
                key=WorkerKey(JOB, 3, 0), node=NODE, gpu_uuids=(GpuUuid("G0"),), is_flexible=False
            )
        },
        ended=EndedWorkers(
            workers={1: EndedWorker(WorkerKey(JOB, 3, 1), NODE)},
            earlier=[EndedWorker(WorkerKey(JOB, 2, 0), NODE)],
            at_s=34.0,
        ),
        started_at_s=2.0,
        counts=JobCounts(
            preemptions=24, node_faults=25, own_faults=26, resizes=27, suspensions=28, migrations=29
        ),
        wait=WaitEntry(
            pending_since_s=30.0,
            queueing_s=33.0,
            kind="quota",
            since_s=35.0,
            spent_s={"quota": 36.0},
        ),
        progress=Progress(step=37, total_steps=38),
        saves=SaveState(
            checkpoint=Checkpoint(path="/ckpt", step=10, is_verified=True),
            at_s=11.0,
            attained_gpu_s=12.0,
        ),
        clock=WorkClock(at_s=7.0, worker_s=6.0, attained_gpu_s=8.0, progress_gpu_s=9.0),
        estimate=WorkEstimate(
            expected_work_s=13.0,
            source="declared",
            measured_left_s=14.0,
            measured_worker_s=15.0,
            measured_work_s=16.0,
            longest_work_s=17.0,
            first_step=18,
            first_worker_s=19.0,
            first_work_s=20.0,
        ),
        suspension=Suspension(since_s=21.0, total_s=22.0, before_attempt_s=23.0),
    )


def node() -> NodeEntry:
    """The node in that state."""
    left = LeftReservation(
        key=WorkerKey(JOB, 2, 1),
        gpu_uuids=(GpuUuid("G1"),),
        reason=StopReason.GANG_TIMEOUT,
        generation=12,
    )
    return NodeEntry(
        name=NODE,
        home_pool=Pool.INFERENCE,
        role=NodeRole.ON_LOAN,
        boot_id="b",
        contact=Contact(is_heard=True, heard_at_s=4.0, silent_since_s=11.0, epoch=5, generation=6),
        desired=DesiredEntry(role=NodeRole.SERVING, generation=7, validation=8),
        service=ServiceName("chat"),
        gpus=[GpuSlot(GpuUuid("G0"), "A100", holder=WorkerKey(JOB, 3, 0))],
        detail="fine",
        ledger=LedgerEntry(
            error="disk full",
            unknown_workers=[WorkerKey(JOB, 4, 0)],
            stores=[WorkerKey(JOB, 3, -1)],
            stale_stops=[WorkerKey(JOB, 1, 1)],
            left_reservations=[left],
            acknowledged=[WorkerKey(JOB, 1, 2)],
        ),
        failed_starts=FailedStarts(
            refused=2,
            last=WorkerKey(JOB, 1, 0),
            hung=[HungStart("/data", 3.0)],
            closed_reason="it refused 3 starts in a row",
        ),
        homecoming=Homecoming(
            lease_id=LeaseId("l1"),
            is_awaited=True,
            reclaim_at_s=10.0,
            stage_durations_s={"save": 9.0},
        ),
        cordon=Cordon(is_cordoned=True, is_draining=True, reason="by ops"),
    )


def test_a_state_of_version_1_is_read_whole() -> None:
    """Fields that moved into a group keep their values."""
    found = decode_state(VERSION_1.read_bytes())
    assert found.jobs == {JOB: job()}
    assert found.nodes == {NODE: node()}
    assert found == ClusterState(
        now_s=40.0,
        epoch=5,
        jobs={JOB: job()},
        nodes={NODE: node()},
        live_jobs={JOB: None},
        next_job_number=2,
        policy_memory=b"\xc1\x00",
    )


def test_a_state_from_before_there_were_stores_is_read() -> None:
    """Earlier coordinators of version 1 lack fields: their defaults say: none."""
    old = msgspec.msgpack.decode(VERSION_1.read_bytes())
    del old["nodes"][NODE]["stores"], old["nodes"][NODE]["silent_since_s"]
    del old["jobs"][JOB]["store"], old["jobs"][JOB]["spec"]["rendezvous"]
    found = decode_state(msgspec.msgpack.encode(old))
    assert (found.nodes[NODE].ledger.stores, found.nodes[NODE].contact.silent_since_s) == ([], None)
    assert found.jobs[JOB] == job()


def test_a_state_of_a_newer_version_is_refused() -> None:
    """Its fields may have moved: what is missing here would be read as never set."""
    newer = msgspec.msgpack.encode(ClusterState(version=STATE_VERSION + 1))
    with pytest.raises(ProtocolError, match=rf"version: {STATE_VERSION + 1}, .*newer coordinator"):
        decode_state(newer)


def test_a_state_is_saved_in_the_form_of_today() -> None:
    """A state that was read in an older form is not of that form any more."""
    state = decode_state(VERSION_1.read_bytes())
    again = Engine(EngineSettings(), state).encode_state()
    assert msgspec.msgpack.decode(again)["version"] == STATE_VERSION
    assert decode_state(again) == state
