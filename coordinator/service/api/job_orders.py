"""Orders about jobs that were submitted: cancel, hold, release, requeue, change.

An order to several jobs is checked for all of them before it is given to any. Only users of a job's
tenant, and operators, may give one.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from msgspec import UNSET

from common import arrays as array_text
from common.api import (
    OPERATORS,
    ApiErrorCode,
    Cancel,
    Change,
    Done,
    Hold,
    Release,
    Requeue,
    Throttle,
)
from common.errors import ConfigError
from common.model import FINAL_JOB_STATES, NODE_FIELDS, JobChange, JobId, JobSpec
from coordinator.engine.jobs import array_orders, arrays, changes, person_orders, prerun_spec
from coordinator.engine.jobs.start_gate import Gated, id_of
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.events import (
    ArrayThrottled,
    JobCancelRequested,
    JobChanged,
    JobsHeld,
    JobsReleased,
    JobsRequeued,
)
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.contract.text import counted
from coordinator.service.api import name_lookup
from coordinator.service.api.name_lookup import Refusal
from coordinator.service.api.refused_orders import client_of
from coordinator.service.coordinator import Coordinator

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
                self._check(jobs, lambda job: self._why_not_held(job, tenant))
                await self._coordinator.record(JobsHeld(job_ids=_ids(jobs), by=by, client=client))
                self._check(jobs, lambda job: "" if job.gate.held_by else _moved(job))
                return _done(jobs, "is held", "are held")
            case Release():
                jobs = self._jobs(request.job_ids, tenant)
                self._check(jobs, self._why_not_released)
                self._check_holder(jobs, tenant)
                await self._coordinator.record(
                    JobsReleased(job_ids=_ids(jobs), by=by, client=client)
                )
                return _done(jobs, "is released", "are released")
            case Requeue():
                jobs, is_held = self._jobs(request.job_ids, tenant), request.is_held
                self._check(jobs, lambda job: self._why_not_requeued(job, is_held=is_held))
                await self._coordinator.record(
                    JobsRequeued(job_ids=_ids(jobs), by=by, client=client, is_held=is_held)
                )
                then = " and held" if is_held else ""
                return _done(jobs, f"is being requeued{then}", f"are being requeued{then}")
            case Change():
                [job] = self._jobs([request.job_id], tenant)
                return await self._change(job, request, by)

    @property
    def _state(self) -> ClusterState:
        return self._coordinator.engine.state

    def _jobs(self, names: Sequence[str], tenant: str) -> list[Gated]:
        found = {id_of(one): one for one in (self._named(name) for name in names)}
        for one in found.values():
            _check_owner(one, tenant)
        return list(found.values())

    def _named(self, name: str) -> Gated:
        return name_lookup.job_or_array(self._state, name)

    def _why_not_held(self, one: Gated, tenant: str) -> str:
        if isinstance(one, ArrayEntry):
            why = array_orders.why_not_held(one)
        else:
            why = person_orders.why_not_held(one)
        if not why and tenant != OPERATORS and _is_operators(one):
            return f"{_what(one)} {id_of(one)} is held by {one.gate.held_by} already"
        return why

    def _why_not_released(self, one: Gated) -> str:
        if isinstance(one, ArrayEntry):
            return array_orders.why_not_released(self._state, one)
        return person_orders.why_not_released(one)

    def _why_not_requeued(self, one: Gated, *, is_held: bool) -> str:
        if isinstance(one, ArrayEntry):
            return array_orders.why_not_requeued(self._state, one, is_held=is_held)
        return person_orders.why_not_requeued(one, is_held=is_held)

    def _check(self, jobs: Sequence[Gated], why_not: Callable[[Gated], str]) -> None:
        for job in jobs:
            if why := why_not(job):
                raise Refusal(ApiErrorCode.CONFLICT, why, "job_id")

    def _check_holder(self, jobs: Sequence[Gated], tenant: str) -> None:
        tasks = (
            task
            for one in jobs
            if isinstance(one, ArrayEntry)
            for task in array_orders.held_tasks(self._state, one)
        )
        for one in (*jobs, *tasks):
            if tenant != OPERATORS and _is_operators(one):
                held = f"{_what(one)} {id_of(one)} is held by {one.gate.held_by}"
                why = f"{held}: an operator releases it"
                raise Refusal(ApiErrorCode.DENIED, why, "job_id")

    async def _cancel(self, request: Cancel, tenant: str, by: str) -> Done:
        state, name, client = self._state, request.job_id, client_of(request)
        array, indices = name_lookup.tasks_of(state, name)
        if array is not None:
            _check_owner(array, tenant)
            return await self._cancel_tasks(array, indices, by, client)
        job = name_lookup.job_or_array(state, name)
        _check_owner(job, tenant)
        job_id = id_of(job)
        what = _what(job)
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
        array = name_lookup.job_or_array(self._state, request.job_id)
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

    async def _change(self, one: Gated, request: Change, by: str) -> Done:
        change = JobChange(
            priority=request.priority,
            time_limit_s=request.time_limit_s,
            deadline_s=request.deadline_s,
            workers=request.workers,
            depends_on=request.depends_on
            and name_lookup.dependencies(self._state, request.depends_on),
            require=request.require,
            exclude=request.exclude,
            require_nodes=request.require_nodes,
            exclude_nodes=request.exclude_nodes,
        )
        before = _spec(one)
        self._check_change(one, change)
        self._check_spec(changes.changed(before, change))
        await self._coordinator.record(
            JobChanged(job_id=id_of(one), by=by, client=client_of(request), change=change)
        )
        if _spec(one) != changes.changed(_spec(one), change):
            self._check_change(one, change)
            raise Refusal(ApiErrorCode.CONFLICT, _moved(one), "job_id")
        words = changes.in_words(before, change)
        return Done(
            detail=f"{_what(one)} {id_of(one)} is changed: {words}{self._warned(one, change)}"
        )

    def _warned(self, one: Gated, change: JobChange) -> str:
        """That no node fits what a change asks of nodes; empty if one does."""
        if all(getattr(change, name) is UNSET for name in NODE_FIELDS):
            return ""
        why = self._coordinator.engine.explain.why_no_node(_spec(one))
        return f"; warning: {why}" if why else ""

    def _check_change(self, one: Gated, change: JobChange) -> None:
        if isinstance(one, ArrayEntry):
            found = array_orders.why_not_changed(self._state, one, change)
        else:
            found = changes.why_not(self._state, one, change)
        if found is None:
            return
        is_state = found.field == "job_id"
        code = ApiErrorCode.CONFLICT if is_state else ApiErrorCode.USAGE
        raise Refusal(code, found.what, found.field)


def _check_owner(one: Gated, tenant: str) -> None:
    if tenant not in (one.tenant, OPERATORS):
        why = f"job {id_of(one)} belongs to {one.tenant}"
        raise Refusal(ApiErrorCode.DENIED, why, "job_id")


def _is_operators(one: Gated) -> bool:
    """Whether an operator holds a job or an array of another tenant."""
    return one.tenant != OPERATORS and one.gate.held_by.startswith(f"{OPERATORS}/")


def _moved(one: Gated) -> str:
    return f"{_what(one)} {id_of(one)} is {one.state} meanwhile"


def _what(one: Gated) -> str:
    return "array" if isinstance(one, ArrayEntry) else "job"


def _spec(one: Gated) -> JobSpec:
    """The spec as its user gave it and changed it."""
    return one.spec if isinstance(one, ArrayEntry) else prerun_spec.submitted(one)


def _ids(jobs: Sequence[Gated]) -> tuple[JobId, ...]:
    return tuple(map(id_of, jobs))


def _done(jobs: Sequence[Gated], one: str, many: str) -> Done:
    if len(jobs) == 1:
        return Done(detail=f"{_what(jobs[0])} {id_of(jobs[0])} {one}")
    if len(jobs) <= NAMED_MAX:
        return Done(detail=f"jobs {', '.join(map(id_of, jobs))} {many}")
    return Done(detail=f"{counted(len(jobs), 'job')} {many}")
