"""Orders about jobs that were submitted: cancel, hold, release, requeue, change.

An order to several jobs is checked for all of them before it is given to any. Only users of a job's
tenant, and operators, may give one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from common import arrays as array_text
from common.api import ApiErrorCode, Cancel, Change, Done, Hold, Release, Requeue, Throttle
from common.errors import ConfigError
from common.model import FINAL_JOB_STATES, JobChange, JobId, JobSpec
from coordinator.engine.jobs import arrays, changes, person_orders, prerun_spec
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.events import (
    ArrayThrottled,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
)
from coordinator.engine.state.tables import JobEntry
from coordinator.policies.contract.text import counted
from coordinator.service.api import name_lookup
from coordinator.service.api.name_lookup import Refusal
from coordinator.service.api.refused_orders import client_of
from coordinator.service.coordinator import Coordinator
from coordinator.service.request_tasks import OPERATORS

JobOrder = Cancel | Hold | Release | Requeue | Change | Throttle
NAMED_MAX = 3
"""An answer about more jobs than these gives their number."""


class JobOrders:
    """Gives orders about jobs.

    Args:
        check_spec: raises the refusal of a spec that could never run here.
        check_line: raises the refusal of a tenant with too many waiting jobs.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        check_spec: Callable[[JobSpec], None],
        check_line: Callable[[str, JobId], None],
    ) -> None:
        self._coordinator = coordinator
        self._check_spec = check_spec
        self._check_line = check_line

    async def give(self, request: JobOrder, tenant: str, user: str) -> Done:
        """Check an order, pass it in, and answer once it is in the journal.

        Raises:
            Refusal: it does not fit a job, and no job has changed.
        """
        by, client = f"{tenant}/{user}", client_of(request)
        match request:
            case Cancel():
                return await self._cancel(request, tenant, by)
            case Throttle():
                return await self._throttle(request, tenant, by)
            case Hold():
                jobs = self._jobs(request.job_ids, tenant)
                self._check(jobs, lambda job: _why_not_held(job, tenant))
                await self._coordinator.record(JobsHeld(job_ids=_ids(jobs), by=by, client=client))
                self._check(jobs, lambda job: "" if job.gate.held_by else _moved(job))
                return _done(jobs, "is held", "are held")
            case Release():
                jobs = self._jobs(request.job_ids, tenant)
                self._check(jobs, person_orders.why_not_released)
                self._check_holder(jobs, tenant)
                await self._coordinator.record(
                    JobsReleased(job_ids=_ids(jobs), by=by, client=client)
                )
                return _done(jobs, "is released", "are released")
            case Requeue():
                jobs, is_held = self._jobs(request.job_ids, tenant), request.is_held
                self._check(jobs, lambda job: person_orders.why_not_requeued(job, is_held=is_held))
                await self._coordinator.record(
                    JobsRequeued(job_ids=_ids(jobs), by=by, client=client, is_held=is_held)
                )
                then = " and held" if is_held else ""
                return _done(jobs, f"is being requeued{then}", f"are being requeued{then}")
            case Change():
                [job] = self._jobs([request.job_id], tenant)
                return await self._change(job, request, by)

    def _jobs(self, names: Sequence[str], tenant: str) -> list[JobEntry]:
        state = self._coordinator.engine.state
        found = {job.job_id: job for job in (name_lookup.job(state, name) for name in names)}
        for job in found.values():
            _check_owner(job, tenant)
        return list(found.values())

    def _check(self, jobs: Sequence[JobEntry], why_not: Callable[[JobEntry], str]) -> None:
        for job in jobs:
            if why := why_not(job):
                raise Refusal(ApiErrorCode.CONFLICT, why, "job_id")

    def _check_holder(self, jobs: Sequence[JobEntry], tenant: str) -> None:
        for job in jobs:
            if tenant != OPERATORS and _is_operators(job):
                why = f"job {job.job_id} is held by {job.gate.held_by}: an operator releases it"
                raise Refusal(ApiErrorCode.DENIED, why, "job_id")

    async def _cancel(self, request: Cancel, tenant: str, by: str) -> Done:
        state, name, client = self._coordinator.engine.state, request.job_id, client_of(request)
        array, indices = name_lookup.tasks_of(state, name)
        if array is not None:
            _check_owner(array, tenant)
            return await self._cancel_tasks(array, indices, by, client)
        job = name_lookup.job_or_array(state, name)
        _check_owner(job, tenant)
        job_id = name_lookup.id_of(job)
        what = "array" if isinstance(job, ArrayEntry) else "job"
        if job.state in FINAL_JOB_STATES:
            raise Refusal(ApiErrorCode.CONFLICT, f"{what} {job_id} is {job.state}", "job_id")
        await self._coordinator.record(JobCancelRequested(job_id=job_id, by=by, client=client))
        return Done(detail=f"{what} {job_id} is being cancelled")

    async def _cancel_tasks(self, array: ArrayEntry, text: str, by: str, client: str) -> Done:
        """Cancel some tasks of an array; those that have ended stay as they are."""
        try:
            asked = array_text.indices(text)
        except ConfigError as error:
            raise Refusal(
                ApiErrorCode.USAGE, f"tasks of {array.array_id}: {error}", "job_id"
            ) from (None)
        every = array.indices
        missing = next((index for index in asked if every.place(index) is None), None)
        if missing is not None:
            raise Refusal(
                ApiErrorCode.NOT_FOUND,
                f"array {array.array_id} has no task {missing}; its tasks are {every}",
                "job_id",
            )
        places = arrays.places_of(array, text)
        if not any(p in array.waiting or array.task_id(p) in array.live for p in places):
            raise Refusal(
                ApiErrorCode.CONFLICT, f"tasks {asked} of {array.array_id} have ended", "job_id"
            )
        event = JobCancelRequested(job_id=array.array_id, by=by, client=client, indices=str(asked))
        await self._coordinator.record(event)
        which = f"task {asked} of array {array.array_id} is"
        if len(asked) > 1:
            which = f"tasks {asked} of array {array.array_id} are"
        return Done(detail=f"{which} being cancelled")

    async def _throttle(self, request: Throttle, tenant: str, by: str) -> Done:
        array = name_lookup.job_or_array(self._coordinator.engine.state, request.job_id)
        _check_owner(array, tenant)
        if not isinstance(array, ArrayEntry):
            raise Refusal(
                ApiErrorCode.USAGE,
                f"job {array.job_id} is no array: it has no tasks to throttle",
                "job_id",
            )
        if array.is_over:
            raise Refusal(
                ApiErrorCode.CONFLICT, f"array {array.array_id} is {array.state}", "job_id"
            )
        self._check_line(array.tenant, JobId(""))  # without a bound, more of it are in the line
        event = ArrayThrottled(
            job_id=array.array_id, by=by, client=client_of(request), throttle=request.throttle
        )
        await self._coordinator.record(event)
        said = "without a bound" if request.throttle is None else f"{request.throttle} at once"
        return Done(detail=f"array {array.array_id} runs its tasks {said}")

    async def _change(self, job: JobEntry, request: Change, by: str) -> Done:
        change = JobChange(
            priority=request.priority,
            time_limit_s=request.time_limit_s,
            deadline_s=request.deadline_s,
            workers=request.workers,
            depends_on=request.depends_on,
        )
        before = prerun_spec.submitted(job)
        self._check_change(job, change)
        self._check_spec(changes.changed(before, change))
        await self._coordinator.record(
            JobChanged(job_id=job.job_id, by=by, client=client_of(request), change=change)
        )
        if prerun_spec.submitted(job) != changes.changed(prerun_spec.submitted(job), change):
            self._check_change(job, change)
            raise Refusal(ApiErrorCode.CONFLICT, _moved(job), "job_id")
        return Done(detail=f"job {job.job_id} is changed: {changes.in_words(before, change)}")

    def _check_change(self, job: JobEntry, change: JobChange) -> None:
        found = changes.why_not(self._coordinator.engine.state, job, change)
        if found is None:
            return
        is_state = found.field == "job_id"
        code = ApiErrorCode.CONFLICT if is_state else ApiErrorCode.USAGE
        raise Refusal(code, found.what, found.field)


def _check_owner(one: JobEntry | ArrayEntry, tenant: str) -> None:
    if tenant not in (one.tenant, OPERATORS):
        why = f"job {name_lookup.id_of(one)} belongs to {one.tenant}"
        raise Refusal(ApiErrorCode.DENIED, why, "job_id")


def _why_not_held(job: JobEntry, tenant: str) -> str:
    if why := person_orders.why_not_held(job):
        return why
    if tenant != OPERATORS and _is_operators(job):
        return f"job {job.job_id} is held by {job.gate.held_by} already"
    return ""


def _is_operators(job: JobEntry) -> bool:
    """Whether an operator holds a job of another tenant."""
    return job.tenant != OPERATORS and job.gate.held_by.startswith(f"{OPERATORS}/")


def _moved(job: JobEntry) -> str:
    return f"job {job.job_id} is {job.state} meanwhile"


def _ids(jobs: Sequence[JobEntry]) -> tuple[JobId, ...]:
    return tuple(job.job_id for job in jobs)


def _done(jobs: Sequence[JobEntry], one: str, many: str) -> Done:
    if len(jobs) == 1:
        return Done(detail=f"job {jobs[0].job_id} {one}")
    if len(jobs) <= NAMED_MAX:
        return Done(detail=f"jobs {', '.join(job.job_id for job in jobs)} {many}")
    return Done(detail=f"{counted(len(jobs), 'job')} {many}")
