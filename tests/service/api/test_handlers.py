"""Bad requests on every verb: counted, answered by the field, and nothing changes."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.api import (
    REQUESTS,
    ApiError,
    ApiErrorCode,
    Describe,
    Description,
    GetEvents,
    GetLogs,
    ListNodes,
    Nodes,
    Operate,
    Submit,
    Submitted,
)
from common.messages import (
    MAX_MESSAGE_BYTES,
    Message,
)
from common.model import GpuRequest, JobId, JobState, NodeName, Pool
from coordinator.engine.state.events import OperatorAction
from coordinator.service.coordinator import Coordinator
from coordinator.sim.run.cluster import NodeSpec
from tests.harness.cluster.coordinator import Agent, Cell, make_spec
from tests.service.wire import Spoilt, example, spoilt
from tests.tables import each_row

REQUEST_CASES = [(kind, case) for kind in REQUESTS for case in spoilt(kind)]


def state(coordinator: Coordinator) -> bytes:
    """All that the engine knows."""
    return coordinator.engine.encode_state()


@each_row(("kind", "case"), REQUEST_CASES)
async def test_a_spoilt_request_is_answered_and_changes_nothing(
    kind: type[Message], case: Spoilt
) -> None:
    """The answer is a usage error that names what did not fit; it is counted; no event enters."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        before, count = state(coordinator), len(cell.records)
        reply = await cell.ask_raw(str(kind.__struct_config__.tag), case.data, tenant="ops")
        assert isinstance(reply, ApiError), reply
        assert reply.code == ApiErrorCode.USAGE
        assert case.names in reply.message
        assert reply.field
        if case.names.isidentifier() and case.names != "type":
            assert case.names in reply.field.split(".")
        assert coordinator.bad_messages == 1
        assert (state(coordinator), len(cell.records)) == (before, count)
        assert cell.leaders[0].bus.handler_error_count == 0


async def test_a_verb_that_is_none_is_answered_with_those_that_are() -> None:
    """A newer CLI hears what this coordinator knows, and its request is counted as bad."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        reply = await cell.ask_raw("levitate", b"")
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, "verb")
        assert all(str(kind.__struct_config__.tag) in reply.message for kind in REQUESTS)
        assert coordinator.bad_messages == 1


@each_row("kind", REQUESTS)
async def test_every_request_has_an_answer(kind: type[Message]) -> None:
    """A request that fits is answered, by its own answer or by a refusal that says why."""
    async with Cell(has_index=True) as cell:
        coordinator = await cell.lead()
        request = msgspec.convert(example(kind), kind)
        reply = await cell.ask(request, tenant="ops")
        if isinstance(reply, ApiError):
            assert reply.message
            assert reply.code != ApiErrorCode.UNAVAILABLE
        assert coordinator.bad_messages == 0
        assert cell.leaders[0].bus.handler_error_count == 0


SPEC: dict[str, Any] = msgspec.to_builtins(make_spec())
BAD_SPECS: dict[str, tuple[dict[str, Any], str, str]] = {
    "unknown key": ({"wrokers": {"min": 1, "max": 1}}, "spec.wrokers", "wrokers"),
    "unknown key below": ({"checkpoint": {"grase_s": 1.0}}, "spec.checkpoint.grase_s", "grase_s"),
    "negative count": ({"workers": {"min": -1, "max": 1}}, "spec.workers.min", ">= 1"),
    "zero GPUs": ({"gpus_per_worker": 0}, "spec.gpus_per_worker", ">= 1"),
    "negative time": ({"time_limit_s": -3.0}, "spec.time_limit_s", "> 0"),
    "min above max": ({"workers": {"min": 3, "max": 2}}, "workers", "min is 3"),
    "empty command": ({"command": []}, "spec.command", "length >= 1"),
    "no command": ({"command": None}, "spec.command", "array"),
    "a name with a dot": ({"name": "a.b"}, "spec.name", "matching regex"),
    "too many GPUs": ({"gpus_per_worker": 9}, "gpus_per_worker", "largest node has 8"),
    "no such type": ({"gpu": {"types": ["B200"]}}, "gpu.types", "there are H100"),
    "no end": ({"expected_runtime_s": float("inf")}, "spec.expected_runtime_s", "<= 1000000000"),
    "endless workers": ({"workers": {"min": 1, "max": 10**8}}, "spec.workers.max", "<= 100000"),
    "empty program": ({"command": [""]}, "command", "name or a path"),
    "NUL in the command": ({"command": ["a", "\0"]}, "command", "NUL"),
    "relative workdir": ({"workdir": "relative/dir"}, "workdir", "absolute path"),
    "env name with =": ({"env": {"A=B": "1"}}, "env", "no name of a variable"),
    "no such signal": ({"checkpoint": {"signal": "HUP"}}, "checkpoint.signal", "signal name"),
    "text for a number": ({"priority": "high"}, "spec.priority", "Expected `int`"),
}


@each_row("why", BAD_SPECS)
async def test_a_bad_job_is_refused_by_the_field(why: str) -> None:
    """The error names the field and what was expected, and no job comes of it."""
    change, field, text = BAD_SPECS[why]
    async with Cell() as cell:
        coordinator = await cell.lead()
        before = state(coordinator)
        request = {**example(Submit), "spec": {**SPEC, **change}}
        reply = await cell.ask_raw("submit", msgspec.msgpack.encode(request))
        assert isinstance(reply, ApiError), reply
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, field)
        assert text in reply.message
        assert (state(coordinator), coordinator.engine.state.jobs) == (before, {})


@pytest.mark.parametrize("field", ["command", "name", "workers"])
async def test_a_job_without_what_it_needs_is_refused(field: str) -> None:
    """The field that is missing is named."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        spec = {key: value for key, value in SPEC.items() if key != field}
        data = msgspec.msgpack.encode({**example(Submit), "spec": spec})
        reply = await cell.ask_raw("submit", data)
        assert isinstance(reply, ApiError)
        assert reply.field == f"spec.{field}"
        assert not coordinator.engine.state.jobs


async def test_a_job_for_nodes_that_are_yet_to_come_waits() -> None:
    """Where no node has reported nobody can say that it never fits."""
    async with Cell(training=0) as cell:
        await cell.lead()
        spec = make_spec(gpus_per_worker=64)
        assert isinstance(await cell.ask(Submit(spec=spec, request_id="r")), Submitted)


async def test_only_the_nodes_that_it_accepts_count() -> None:
    """A type that exists beside one that does not is enough."""
    async with Cell() as cell:
        await cell.lead()
        spec = msgspec.structs.replace(make_spec(), gpu=GpuRequest(types=("B200", "H100")))
        assert isinstance(await cell.ask(Submit(spec=spec, request_id="r")), Submitted)


@pytest.mark.parametrize(("gpu_type", "is_taken"), [("H100", False), ("V100", True), ("", True)])
async def test_a_worker_must_fit_on_a_node_of_its_own_types(
    gpu_type: str, *, is_taken: bool
) -> None:
    """A larger node of another type is none that it could ever have."""
    cell, name = Cell(), NodeName("larger")
    larger = NodeSpec(name=name, home_pool=Pool.TRAINING, gpu_type="V100", gpus=16)
    cell.agents[name] = Agent(cell.network, cell.clock, larger)
    async with cell:
        coordinator = await cell.lead()
        types = (gpu_type,) if gpu_type else ()
        spec = make_spec(gpus_per_worker=9)
        spec = msgspec.structs.replace(spec, gpu=GpuRequest(types=types))
        reply = await cell.ask(Submit(spec=spec, request_id="r"))
        assert len(coordinator.engine.state.jobs) == is_taken
        if not is_taken:
            assert isinstance(reply, ApiError)
            assert (reply.code, reply.field) == (ApiErrorCode.USAGE, "gpus_per_worker")
            assert reply.message.endswith("the largest node has 8")


@each_row("action", [*OperatorAction, "explode"])
async def test_an_order_about_nothing_is_refused(action: str) -> None:
    """A target, a value or a verb that is none changes nothing, and the error names which."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        before = state(coordinator)
        in_s = 5.0 if action == OperatorAction.DRAIN_AT else msgspec.UNSET
        request = Operate(action=action, target="nowhere", value="x", in_s=in_s)
        reply = await cell.ask(request, tenant="ops")
        assert isinstance(reply, ApiError), reply
        assert reply.code in (ApiErrorCode.NOT_FOUND, ApiErrorCode.USAGE)
        assert reply.field in ("node", "loan", "service", "action", "mode")
        assert state(coordinator) == before


async def test_a_mode_that_is_none_is_refused() -> None:
    """The error lists those that are."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        request = Operate(action="set_mode", target="chat", value="yolo")
        reply = await cell.ask(request, tenant="ops")
        assert isinstance(reply, ApiError)
        assert reply.field == "mode"
        assert "observe, recommend, act" in reply.message


@each_row("kind", ["job", "node", "service", "loan"])
async def test_what_does_not_exist_is_not_found(kind: str) -> None:
    """Describing nothing names what there is, or that there is none."""
    async with Cell() as cell:
        await cell.lead()
        reply = await cell.ask(Describe(kind=kind, name="nowhere"))
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.NOT_FOUND, kind)
        assert "known" in reply.message


async def test_jobs_that_have_ended_are_known_too() -> None:
    """They can be described, so a name that is none is answered with them, live ones first."""
    async with Cell(training=0) as cell:
        coordinator = await cell.lead()
        jobs = coordinator.engine.state.jobs
        submitted = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(submitted, Submitted)
        for number in range(3):
            job_id = JobId(f"old{number}")
            jobs[job_id] = msgspec.structs.replace(
                jobs[JobId(submitted.job_id)], job_id=job_id, state=JobState.SUCCEEDED
            )
        reply = await cell.ask(Describe(kind="job", name="nowhere"))
        assert isinstance(reply, ApiError)
        known = f"{submitted.job_id}, old2, old1, old0"
        assert reply.message == f"no job 'nowhere'; known: {known}"


async def test_a_job_that_never_started_has_no_log() -> None:
    """Said as it is: nobody has to guess whether its log was lost."""
    async with Cell() as cell:
        await cell.lead()
        spec = make_spec("big", workers=(9, 9))
        submitted = await cell.ask(Submit(spec=spec, request_id="r"))
        assert isinstance(submitted, Submitted)
        reply = await cell.ask(GetLogs(job_id=submitted.job_id))
        assert isinstance(reply, ApiError)
        assert reply.code == ApiErrorCode.NOT_FOUND
        assert "is pending and never started" in reply.message


async def test_what_exists_is_described() -> None:
    """A job by id and by name, a node, a service: with why it is where it is, and its story."""
    async with Cell(inference=1) as cell:
        await cell.lead()
        submitted = await cell.ask(Submit(spec=make_spec("train"), request_id="r"))
        assert isinstance(submitted, Submitted)
        for kind, name in (
            ("job", submitted.job_id),
            ("job", "train"),
            ("node", "t0"),
            ("service", "chat"),
        ):
            reply = await cell.ask(Describe(kind=kind, name=name))
            assert isinstance(reply, Description), reply
            assert getattr(reply, kind) is not None
        events = await cell.ask(GetEvents(subject=submitted.job_id))
        assert "submitted" in str(events)


async def test_an_answer_that_no_message_carries_is_refused_at_once() -> None:
    """A caller who asks for too much hears so, instead of nothing until its timeout."""
    async with Cell(training=0) as cell:
        coordinator = await cell.lead()
        first = await cell.ask(Submit(spec=make_spec(), request_id="r"))
        assert isinstance(first, Submitted)
        coordinator.engine.state.jobs[JobId(first.job_id)].error = "x" * MAX_MESSAGE_BYTES
        reply = await cell.ask(Describe(kind="job", name=first.job_id))
        assert isinstance(reply, ApiError)
        assert str(MAX_MESSAGE_BYTES) in reply.message
        assert isinstance(await cell.ask(ListNodes()), Nodes)
