"""Arrays through the API: names of tasks, orders, pages, and limits at submission."""

from __future__ import annotations

import re

import pytest
from msgspec.structs import replace

from common.api import (
    ApiError,
    ApiErrorCode,
    ArrayRow,
    Cancel,
    Change,
    Describe,
    Description,
    Done,
    GetLogs,
    GetStatus,
    Hold,
    JobRow,
    Jobs,
    ListJobs,
    ListTenants,
    Release,
    Requeue,
    Status,
    Submit,
    Submitted,
    Tenants,
    Throttle,
)
from common.messages import Message
from common.model import (
    ArraySpec,
    CheckpointSpec,
    Dependency,
    DependencyKind,
    Gate,
    JobId,
    JobState,
)
from coordinator.engine.state.settings import TenantSettings
from coordinator.service.settings import CoordinatorSettings
from tests.harness.cluster.coordinator import Cell, Reply, make_settings, make_spec


def array_of(indices: str, throttle: int | None = None, *, name: str = "sweep") -> Submit:
    """An array that waits for ever: no two nodes of the cell could hold a task."""
    spec = make_spec(name, workers=(9, 9))
    array = ArraySpec(indices=indices, throttle=throttle)
    return Submit(spec=replace(spec, array=array), request_id=_token(f"{name}-{indices}"))


def _token(text: str) -> str:
    return re.sub("[^0-9a-z-]", "_", text)


async def submitted(cell: Cell, request: Submit, **who: str) -> str:
    """The id of what was submitted."""
    reply = await cell.ask(request, **who)
    assert isinstance(reply, Submitted), reply
    return reply.job_id


async def refused(cell: Cell, request: Message, code: ApiErrorCode, *words: str) -> None:
    """Check that a request is refused in these words, and changes nothing."""
    reply: Reply = await cell.ask(request)
    assert isinstance(reply, ApiError), reply
    assert (reply.code, [word for word in words if word not in reply.message]) == (code, [])


async def described(cell: Cell, name: str) -> JobRow:
    """The row of a job or an array in its description."""
    found = await cell.ask(Describe(kind="job", name=name))
    assert isinstance(found, Description), found
    assert found.job is not None
    return found.job


async def test_an_array_and_its_tasks_go_by_id_and_by_name() -> None:
    """One submission is one array; the same request is the same one; a task has its own name."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        array_id = await submitted(cell, array_of("0-99", 5))
        assert await submitted(cell, array_of("0-99", 5)) == array_id
        await refused(
            cell, replace(array_of("0-98"), request_id="sweep-0-99"), ApiErrorCode.CONFLICT,
            "already submitted",
        )  # fmt: skip
        for name in (array_id, "sweep"):
            row = await described(cell, name)
            assert (row.job_id, row.state) == (array_id, JobState.PENDING)
            assert row.array == ArrayRow(
                indices="0-99", throttle=5, tasks=100, waiting=100, running=0, succeeded=0,
                failed=0, cancelled=0, ranges={"waiting": "0-99"},
            )  # fmt: skip
        task = await described(cell, "sweep_3")
        assert (task.job_id, task.array_id, task.array_index) == (f"{array_id}_3", array_id, 3)
        code = ApiErrorCode.NOT_FOUND
        waits = await described(cell, "sweep_7")
        assert (waits.job_id, waits.state, waits.array_index) == (f"{array_id}_7", "pending", 7)
        assert waits.blockers[0] == "it is not in the line yet: at most 5 at once (throttle)"
        await refused(cell, Cancel(job_id="sweep_[7-100]"), code, "no task 100")
        await refused(cell, Hold(job_ids=("sweep_7",)), code, "not in the line yet")
        await refused(cell, Describe(kind="job", name="sweep_100"), code, "no task '100'", "0-99")
        await refused(cell, GetLogs(job_id="sweep"), ApiErrorCode.CONFLICT, f"{array_id}_0")
        found = await cell.ask(ListJobs(is_live_only=True))
        assert isinstance(found, Jobs)
        assert [row.job_id for row in found.rows] == [
            array_id, *(f"{array_id}_{index}" for index in range(5))]  # fmt: skip
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert status.pending_jobs == 100
        assert coordinator.engine.check() == []


async def test_an_array_can_be_held_and_wait_for_others() -> None:
    """Answers, rows and the status say why it is in no queue, and who opens it."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        first = await submitted(cell, array_of("0-9", name="first"))
        after = (Dependency(job=f"{first}_7", when=DependencyKind.NOT_OK),)
        spec = replace(array_of("0-99", 5).spec, is_held=True, depends_on=after)
        request = Submit(spec=spec, request_id="held")
        reply = await cell.ask(request)
        assert isinstance(reply, Submitted) and isinstance(reply.gate, str)
        for word in ("held by team/ann", f"aryl job release {reply.job_id}", f"{first}_7 to fail"):
            assert word in reply.gate
        row = await described(cell, reply.job_id)
        assert (row.gate, row.queueing_s, "; ".join(row.blockers)) == (Gate.HELD, 0.0, reply.gate)
        await refused(
            cell, Requeue(job_ids=(f"{reply.job_id}_7",)), ApiErrorCode.NOT_FOUND,
            f"is not in the line yet: {reply.gate}",
        )  # fmt: skip
        status = await cell.ask(GetStatus())
        assert isinstance(status, Status)
        assert (status.pending_jobs, status.held_jobs) == (110, 100)
        assert coordinator.engine.waiting_jobs("team") == 10 + 5 + 1
        ids = (reply.job_id,)
        assert isinstance(await cell.ask(Hold(job_ids=ids), tenant="ops"), Done)
        await refused(cell, Release(job_ids=ids), ApiErrorCode.DENIED, "held by ops/ann")
        assert isinstance(await cell.ask(Release(job_ids=ids), tenant="ops"), Done)
        assert (await described(cell, reply.job_id)).gate == Gate.DEPENDENCY
        conflict, usage = ApiErrorCode.CONFLICT, ApiErrorCode.USAGE
        await refused(cell, Release(job_ids=ids), conflict, "is not held")
        await refused(cell, Requeue(job_ids=ids), conflict, "no task of array")
        own = Dependency(job=f"{reply.job_id}_3", when=DependencyKind.OK)
        change = Change(job_id=reply.job_id, depends_on=(own,))
        await refused(cell, change, usage, "would wait for itself")
        done = await cell.ask(Change(job_id=reply.job_id, priority=9, depends_on=()))
        assert isinstance(done, Done) and done.detail.startswith(f"array {reply.job_id} is changed")
        assert (await described(cell, f"{reply.job_id}_3")).state == JobState.PENDING
        assert await submitted(cell, request) == reply.job_id
        assert coordinator.engine.check() == []


async def test_tasks_are_cancelled_by_range_and_throttled() -> None:
    """A bad range changes nothing; what has ended is not cancelled again."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        array_id = JobId(await submitted(cell, array_of("0-90:10", 3)))
        array = coordinator.engine.state.arrays[array_id]
        usage, missing = ApiErrorCode.USAGE, ApiErrorCode.NOT_FOUND
        await refused(cell, Cancel(job_id="sweep_[a]"), usage, "expected indices")
        await refused(cell, Cancel(job_id="sweep_[]"), usage, "expected indices")
        await refused(cell, Cancel(job_id="sweep_[0-20]"), missing, "no task 1;", "0-90:10")
        await refused(cell, Cancel(job_id="sweep_5"), missing, "no task 5;")
        assert not array.cancelled
        assert isinstance(await cell.ask(Cancel(job_id="sweep_[0-30:10,90]")), Done)
        assert array.text_of(array.cancelled) == "0-30:10,90"
        assert array.text_of(array.waiting) == "70,80"
        await refused(cell, Cancel(job_id="sweep_10"), ApiErrorCode.CONFLICT, "have ended")
        assert isinstance(await cell.ask(Throttle(job_id="sweep", throttle=1)), Done)
        assert len(array.live) == 1
        assert isinstance(await cell.ask(Throttle(job_id="sweep", throttle=None)), Done)
        assert len(array.live) == 5
        denied = await cell.ask(Cancel(job_id=array_id), tenant="other")
        assert isinstance(denied, ApiError)
        assert denied.code == ApiErrorCode.DENIED
        assert isinstance(await cell.ask(Cancel(job_id=array_id)), Done)
        assert (await described(cell, array_id)).state == JobState.CANCELLED
        for request in (Cancel(job_id=array_id), Throttle(job_id=array_id, throttle=2)):
            await refused(cell, request, ApiErrorCode.CONFLICT, "is cancelled")
        job_id = await submitted(cell, Submit(spec=make_spec("plain"), request_id="p"))
        await refused(cell, Throttle(job_id=job_id, throttle=2), usage, "no array")
        assert coordinator.engine.check() == []


@pytest.mark.parametrize(
    ("request_", "field"),
    [
        (array_of("0-10000"), "array.indices"),
        (array_of(""), "array.indices"),
        (array_of("0-9%5"), "array.indices"),
        (
            Submit(
                spec=replace(array_of("0-9").spec, checkpoint=CheckpointSpec(path="save")),
                request_id="r",
            ),
            "checkpoint.path",
        ),
    ],
)
async def test_a_bad_array_is_refused_by_its_field(request_: Submit, field: str) -> None:
    """Nothing enters the journal."""
    async with Cell() as cell:
        coordinator = await cell.lead()
        reply = await cell.ask(request_)
        assert isinstance(reply, ApiError)
        assert (reply.code, reply.field) == (ApiErrorCode.USAGE, field)
        assert not coordinator.engine.state.arrays


def limited(**limits: int) -> CoordinatorSettings:
    """Settings of a cell in which a tenant has limits."""
    settings = make_settings()
    tenants = (TenantSettings(name="team", **limits),)  # type: ignore[arg-type]  # no text among them
    return replace(settings, engine=replace(settings.engine, tenants=tenants))


async def test_a_user_has_no_more_jobs_than_the_limit() -> None:
    """Each task of an array is one, in the line or not; other users and tenants are taken."""
    async with Cell() as cell:
        await cell.lead(settings=limited(user_max_jobs=100, user_max_gpus=8))
        await submitted(cell, array_of("0-97", 2))
        one = Submit(spec=make_spec("one", workers=(9, 9)), request_id="one")
        more = array_of("0-2", name="more")
        words = ("user ann of tenant team", "98 jobs", "3 more exceed 100", "user_max_jobs")
        await refused(cell, more, ApiErrorCode.CONFLICT, *words)
        await submitted(cell, one)
        await submitted(cell, more, user="bob")
        await submitted(cell, more, tenant="other")
        await refused(cell, array_of("0-1", name="two"), ApiErrorCode.CONFLICT, "99 jobs")
        assert isinstance(await cell.ask(Cancel(job_id="sweep_[90-97]")), Done)
        await submitted(cell, array_of("0-1", name="two"))
        found = await cell.ask(ListTenants())
        assert isinstance(found, Tenants)
        [team] = [row for row in found.rows if row.tenant == "team"]
        assert (team.user_max_gpus, team.user_max_jobs) == (8, 100)


async def test_an_array_counts_as_its_window_among_waiting_jobs() -> None:
    """A tenant that has its limit of waiting jobs gets no further array, and no wider one."""
    async with Cell() as cell:
        coordinator = await cell.lead(settings=limited(waiting_jobs_max=60))
        await submitted(cell, array_of("0-9999", 1))
        assert coordinator.engine.waiting_jobs("team") == 2
        await submitted(cell, array_of("0-9999", name="wide"))
        assert coordinator.engine.waiting_jobs("team") == 2 + 64 + 1
        await refused(cell, array_of("0-1", name="two"), ApiErrorCode.CONFLICT, "67 jobs waiting")
        words = "67 jobs waiting"
        await refused(cell, Throttle(job_id="sweep", throttle=9), ApiErrorCode.CONFLICT, words)
        assert isinstance(await cell.ask(Cancel(job_id="wide")), Done)
        assert isinstance(await cell.ask(Throttle(job_id="sweep", throttle=9)), Done)
