"""Whose fault an end is, as older versions said it in words: read once, and the same ever after."""

from __future__ import annotations

from pathlib import Path

import msgspec
import pytest

from common.faults import Fault
from common.messages import NodeReport, WorkerPhase, WorkerReport, decode, encode
from common.model import JobId, WorkerKey
from coordinator.engine.record import decode_record
from coordinator.engine.state.events import NodeReported
from coordinator.service.nodes.report_folding import facts_of
from coordinator.service.nodes.report_validation import node_report

RECORDED = Path(__file__).parents[1] / "data" / "wire"
SUBJECT = "aryl.v1.lab.node.t0.report"
P = WorkerPhase
SAID = [
    (P.REFUSED, Fault.STORAGE, ""),
    (P.REFUSED, Fault.STORAGE, ""),
    (P.REFUSED, Fault.NODE, ""),
    (P.EXITED, Fault.SHIM_LOST, ""),
    (P.REFUSED, Fault.JOB, "workdir"),
    (P.REFUSED, Fault.JOB, "checkpoint.path"),
    (P.EXITED, Fault.NONE, ""),
    (P.EXITED, Fault.NONE, ""),
    (P.RESERVING, Fault.NONE, ""),
]
"""Of the workers of the recorded report, in order."""


def recorded_report() -> NodeReport:
    """What an agent sent that had no field for it, byte by byte."""
    return node_report((RECORDED / "report_with_words.msgpack").read_bytes(), SUBJECT)


def test_a_report_of_an_older_agent_says_whose_fault_it_is() -> None:
    """Coordinators are upgraded first, so their agents tell it in words for a while."""
    workers = recorded_report().workers
    assert [(one.phase, one.fault, one.refused_for) for one in workers] == SAID
    assert not [one for one in workers[:-1] if "node fault" in one.error]
    assert workers[3].error == "shim lost: the node has booted since"
    assert workers[-1].error == "node fault is not what it waits for"


def test_a_record_of_an_older_version_says_what_the_report_of_that_time_said() -> None:
    """So that a journal is decided again as it was, whatever the words are today."""
    data = (RECORDED / "record_with_words.msgpack").read_bytes()
    [entry] = decode_record(data, sequence=1).entries
    assert isinstance(entry.event, NodeReported)
    assert entry.event == facts_of(recorded_report())
    assert [(one.phase, one.fault, one.refused_for) for one in entry.event.workers] == SAID


@pytest.mark.parametrize("fault", [fault for fault in Fault if fault != Fault.NONE])
def test_what_an_agent_says_in_the_field_is_not_read_in_its_words(fault: Fault) -> None:
    """The words are for people, and may be anything."""
    key = WorkerKey(JobId("j"), 1, 0)
    worker = WorkerReport(
        key=key, phase=P.REFUSED, gpu_uuids=(), error="node fault: x", fault=fault
    )
    told = msgspec.structs.replace(recorded_report(), workers=(worker,))
    assert node_report(encode(told), SUBJECT).workers == (worker,)


def test_a_worker_without_a_fault_is_told_in_the_bytes_that_it_always_was() -> None:
    """A coordinator that does not know the fields refuses the report of no node that is well."""
    worker = WorkerReport(
        key=WorkerKey(JobId("j"), 1, 0), phase=P.EXITED, gpu_uuids=(), exit_code=1
    )
    told = msgspec.structs.replace(recorded_report(), workers=(worker,))
    plain = msgspec.msgpack.decode(encode(told))
    assert plain["workers"] == [
        {
            "key": {"job_id": "j", "attempt": 1, "worker_index": 0},
            "phase": "exited",
            "gpu_uuids": [],
            "exit_code": 1,
        }
    ]
    assert decode(encode(told), NodeReport) == told
