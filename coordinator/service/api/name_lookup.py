"""Resolves a name in a request to a job, a node, a service or a loan. Pure."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from math import inf

from msgspec import Struct
from msgspec.structs import replace

from common.api import ApiError, ApiErrorCode
from common.apirows import StoryRow
from common.model import Dependency, JobId, LeaseId, NodeName, ServiceName
from coordinator.engine.jobs import numbers
from coordinator.engine.jobs.start_gate import id_of, why_shut
from coordinator.engine.nodes.maintenance import REMOVED
from coordinator.engine.state.array_entry import ArrayEntry
from coordinator.engine.state.tables import ClusterState, JobEntry, LoanEntry, NodeEntry, StoryLine
from coordinator.policies.contract.text import counted

CELL = "cell"
"""The subject of events of the whole cell."""


class Refusal(Exception):  # noqa: N818 - an answer, not a fault of ours
    """The request changed nothing; carries the error for the caller."""

    def __init__(self, code: ApiErrorCode, message: str, field: str = "") -> None:
        super().__init__(message)
        self.error = ApiError(code=code, message=message, field=field)


class Subject(Struct, frozen=True, kw_only=True):
    """The subject of the requested event lines.

    name: by kind and id, which stays the same even if another object takes the name meanwhile.
    words: the subjects of its lines; empty: of any.
    from_s, to_s: only lines of this span count, both ends included.
    """

    name: str = ""
    words: frozenset[str] = frozenset()
    from_s: float = -inf
    to_s: float = inf

    def covers(self, line: StoryLine | StoryRow) -> bool:
        """True if a line belongs to the subject."""
        is_named = not self.words or line.subject in self.words
        return is_named and self.from_s <= line.at_s <= self.to_s


ANYTHING = Subject()


def unknown(kind: str, name: str, known: Sequence[str]) -> Refusal:
    """The refusal of an unknown name; lists the known ones."""
    some = ", ".join(known[:8]) + (", ..." if len(known) > 8 else "")
    hint = f"; known: {some}" if known else "; none is known"
    return Refusal(ApiErrorCode.NOT_FOUND, f"no {kind} {name!r}{hint}", kind)


def job(state: ClusterState, name: str) -> JobEntry:
    """A job by id, by number, or by a name that only one live job has, or else only one job at all.

    Raises:
        Refusal: no job has it, or several have, or it is an array.
    """
    found = job_or_array(state, name)
    if isinstance(found, JobEntry):
        return found
    raise Refusal(
        ApiErrorCode.CONFLICT,
        f"{found.array_id} is an array of {counted(len(found.indices), 'task')}; name one of them, "
        f"such as {found.task_id(0)}",
        "job_id",
    )


def job_or_array(state: ClusterState, name: str) -> JobEntry | ArrayEntry:
    """As `job`, or an array by its id or name. A task goes by its array and index, `ARRAY_7`.

    Raises:
        Refusal: no job has it, or several have; or it is a task that is no job now.
    """
    found = state.jobs.get(JobId(name)) or state.arrays.get(JobId(name)) or _of_number(state, name)
    if found is not None:
        return found
    named = _named(state, name)
    if len(named) == 1:
        return named[0]
    if named:
        ids = ", ".join(id_of(one) for one in named[-5:])
        raise Refusal(
            ApiErrorCode.CONFLICT, f"{len(named)} jobs are named {name!r}: {ids}", "job_id"
        )
    array, tasks = tasks_of(state, name)
    if array is not None:
        return _task(state, array, tasks)
    ended = [job_id for job_id in reversed(state.jobs) if job_id not in state.live_jobs]
    raise unknown("job", name, [*state.live_arrays, *state.live_jobs, *ended])


def _named(state: ClusterState, name: str) -> list[JobEntry | ArrayEntry]:
    """Live jobs and arrays of a name, or else ended ones; tasks go by their array."""
    named = [one for one in _jobs_and_arrays(state) if one.spec.name == name]
    return [one for one in named if one.finished_at_s is None] or named


def _jobs_and_arrays(state: ClusterState) -> Iterator[JobEntry | ArrayEntry]:
    yield from (job for job in state.jobs.values() if job.array_task is None)
    yield from state.arrays.values()


_TASKS = re.compile(r"(?P<array>.+)_(?:(?P<one>\d+)|\[(?P<many>[^\]]*)\])")


def tasks_of(state: ClusterState, name: str) -> tuple[ArrayEntry | None, str]:
    """The array in `ARRAY_7` or `ARRAY_[10-20,30]`, and the indices; None: it names no array."""
    match = _TASKS.fullmatch(name)
    own = state.jobs.get(JobId(name))
    if match is None or (own is not None and own.array_task is None) or _named(state, name):
        return None, ""
    array = state.arrays.get(JobId(match["array"]))
    if array is None:
        numbered = _of_number(state, match["array"])
        array = numbered if isinstance(numbered, ArrayEntry) else None
    if array is None:
        named = _named(state, match["array"])
        array = named[0] if len(named) == 1 and isinstance(named[0], ArrayEntry) else None
    return array, match["one"] or match["many"] or ""


def waiting_task(state: ClusterState, name: str) -> tuple[ArrayEntry, int] | None:
    """The array and the place of a task that is not in the line yet; None: the name is of none."""
    array, tasks = tasks_of(state, name)
    place = array.indices.place(int(tasks)) if array and tasks.isdecimal() else None
    if array is None or place is None or place not in array.waiting:
        return None
    return array, place


def _task(state: ClusterState, array: ArrayEntry, text: str) -> JobEntry:
    """The job that a task is now.

    Raises:
        Refusal: the array has no such task, or it is no job yet, or no more.
    """
    place = _place(array, text)
    found = state.jobs.get(array.task_id(place))
    if found is not None:
        return found
    where = "has ended and is not kept any more"
    if place in array.waiting:
        shut = why_shut(state, array) or ("tasks of its array before it wait or run",)
        where = f"is not in the line yet: {'; '.join(shut)}"
    elif place in array.cancelled:
        where = "was cancelled before it entered the line, or is not kept any more"
    raise Refusal(ApiErrorCode.NOT_FOUND, f"task {text} of {array.array_id} {where}", "job_id")


def _place(array: ArrayEntry, text: str) -> int:
    """The place of a task by its index; Refusal if the array has none of it."""
    place = array.indices.place(int(text)) if text.isdecimal() else None
    if place is None:
        raise Refusal(
            ApiErrorCode.NOT_FOUND,
            f"array {array.array_id} has no task {text!r}; its tasks are {array.indices}",
            "job_id",
        )
    return place


_NUMBERED = re.compile(r"\d+(?:_\d+)?", re.ASCII)


def dependencies(
    state: ClusterState, asked: Sequence[Dependency], before: Sequence[Dependency] = ()
) -> tuple[Dependency, ...]:
    """Dependencies with the ids of jobs in place of numbers, `56` or `56_3`; what stands for none
    stays as it is.

    before: those of the same request as they were resolved the first time; a job that is forgotten
        since then keeps its id.

    Raises:
        Refusal: a number is the name of another job as well.
    """
    places = [*before, *(None,) * (len(asked) - len(before))]
    return tuple(_dependency(state, *pair) for pair in zip(asked, places, strict=False))


def _dependency(state: ClusterState, asked: Dependency, before: Dependency | None) -> Dependency:
    name = asked.job
    if not _NUMBERED.fullmatch(name) or JobId(name) in state.jobs or JobId(name) in state.arrays:
        return asked
    number, _, index = name.partition("_")
    one = numbers.of_number(state, int(number)) if before else _of_number(state, number)
    if one is None:
        return replace(asked, job=before.job) if before else asked
    if not index:
        return replace(asked, job=id_of(one))
    place = one.indices.place(int(index)) if isinstance(one, ArrayEntry) else None
    if place is None or not isinstance(one, ArrayEntry):
        return asked
    return replace(asked, job=one.task_id(place))


def known_id(state: ClusterState, name: str) -> str | None:
    """The id of the job, array, task, node, service or loan that a name stands for; None: of none
    that is remembered.

    Raises:
        Refusal: it stands for several jobs, or for a task that its array does not have.
    """
    others = (state.nodes, state.services, state.loans, state.jobs, state.arrays)
    if any(name in entries for entries in others):
        return name
    array, tasks = tasks_of(state, name)
    if array is not None:
        return array.task_id(_place(array, tasks))
    try:
        return id_of(job_or_array(state, name))
    except Refusal as refusal:
        if refusal.error.code != ApiErrorCode.NOT_FOUND:
            raise
        return None


def _of_number(state: ClusterState, text: str) -> JobEntry | ArrayEntry | None:
    """A job or an array by its number.

    Raises:
        Refusal: the number is the name of another job that has not ended.
    """
    if not (text.isascii() and text.isdecimal()):
        return None
    found = numbers.of_number(state, int(text))
    others = [one for one in _named(state, text) if one.finished_at_s is None and one is not found]
    if found is None or not others:
        return found
    named = ", ".join(id_of(one) for one in others[-5:])
    raise Refusal(
        ApiErrorCode.CONFLICT,
        f"{text!r} is the number of job {id_of(found)} and the name of {named}: give an id",
        "job_id",
    )


def node(state: ClusterState, name: str) -> NodeEntry:
    """A node by name; Refusal if there is none."""
    found = state.nodes.get(NodeName(name))
    if found is None:
        raise unknown("node", name, sorted(state.nodes))
    return found


def loan(state: ClusterState, name: str) -> LoanEntry:
    """A loan by lease id, or the newest of the node that is or was lent.

    Refusal if there is none.
    """
    found = state.loans.get(LeaseId(name))
    if found is not None:
        return found
    of_node = [loan for loan in state.loans.values() if loan.node == name]
    if of_node:
        return of_node[-1]
    if NodeName(name) in state.nodes:
        raise Refusal(ApiErrorCode.NOT_FOUND, not_lent(state, NodeName(name)), "loan")
    raise unknown("loan", name, list(state.loans)[-5:])


def open_loan(state: ClusterState, name: str) -> LoanEntry:
    """As `loan`, among loans not yet returned; otherwise a Refusal with the node's present role."""
    found = loan(state, name)
    if found.returned_at_s is None:
        return found
    said = not_lent(state, found.node)
    if found.node != name:
        said = f"loan {found.lease_id} came home already: {said}"
    raise Refusal(ApiErrorCode.CONFLICT, said, "lease_id")


def not_lent(state: ClusterState, name: NodeName) -> str:
    """The refusal for a node without a loan, with its present role."""
    found = state.nodes.get(name)
    return f"there is no loan of {name}" + ("" if found is None else f", which is {found.role}")


def about_job(state: ClusterState, name: str) -> Subject:
    """The lines of a job or an array, even of a forgotten one while its lines are kept."""
    if (task := waiting_task(state, name)) is not None:
        array, place = task
        task_id = array.task_id(place)
        return Subject(name=f"job/{task_id}", words=frozenset({task_id}))
    try:
        job_id = str(id_of(job_or_array(state, name)))
    except Refusal as refusal:
        others = {CELL, *state.nodes, *state.services}
        is_told_of = any(line.subject == name for line in state.stories)
        is_gone = is_told_of and name not in others and not _was_node(state, name)
        if refusal.error.code != ApiErrorCode.NOT_FOUND or not is_gone:
            raise
        job_id = name
    return Subject(name=f"job/{job_id}", words=frozenset({job_id}))


def about_node(state: ClusterState, name: str) -> Subject:
    """The lines of a node, even of a removed one while its lines are kept."""
    known = name if _was_node(state, name) else node(state, name).name
    return Subject(name=f"node/{name}", words=frozenset({known}))


def _was_node(state: ClusterState, name: str) -> bool:
    return any(line.subject == name and line.what == REMOVED for line in state.stories)


def about_service(state: ClusterState, name: str) -> Subject:
    """The lines of a service and of its nodes."""
    if ServiceName(name) not in state.services:
        raise unknown("service", name, sorted(state.services))
    nodes = {entry.name for entry in state.nodes.values() if entry.service == name}
    return Subject(name=f"service/{name}", words=frozenset({name, *nodes}))


def about_loan(state: ClusterState, name: str) -> Subject:
    """The lines of the lent node while it was lent."""
    found = loan(state, name)
    return Subject(
        name=f"loan/{found.lease_id}",
        words=frozenset({found.node}),
        from_s=found.decided_at_s,
        to_s=inf if found.returned_at_s is None else found.returned_at_s,
    )


_ABOUT: dict[str, Callable[[ClusterState, str], Subject]] = {
    "job": about_job,
    "node": about_node,
    "service": about_service,
    "loan": about_loan,
}


def about(state: ClusterState, asked: str) -> Subject:
    """The subject for an id, a name or `kind/NAME`; empty selects all lines.

    A node's name means the node and not its newest loan; any other name that several kinds share is
    refused.

    Raises:
        Refusal: the name is unknown, or means more than one thing.
    """
    kind, slash, name = asked.partition("/")
    if not asked:
        return ANYTHING
    if asked == CELL:
        return Subject(name=CELL, words=frozenset({CELL}))
    if slash:
        if kind not in _ABOUT:
            known = ", ".join(f"{kind}/" for kind in _ABOUT)
            raise Refusal(
                ApiErrorCode.USAGE, f"{asked!r}: {kind!r} is not one of {known}", "subject"
            )
        return _ABOUT[kind](state, name)
    found = _of_any_kind(state, asked)
    if len(found) == 1:
        return found[0]
    raise Refusal(
        ApiErrorCode.CONFLICT,
        f"{asked!r} is {' and '.join(subject.name for subject in found)}; say which of them",
        "subject",
    )


def _of_any_kind(state: ClusterState, name: str) -> list[Subject]:
    """Check for at least one match; otherwise a Refusal names the obstacle."""
    found: list[Subject] = []
    refusals: list[Refusal] = []
    for kind, of_kind in _ABOUT.items():
        if kind == "loan" and NodeName(name) in state.nodes:
            continue
        try:
            found.append(of_kind(state, name))
        except Refusal as refusal:
            refusals.append(refusal)
    several = [r for r in refusals if r.error.code == ApiErrorCode.CONFLICT]
    if found:
        return found
    if several:
        raise several[0]
    raise Refusal(
        ApiErrorCode.NOT_FOUND,
        f"no job, node, service or loan {name!r}",
        "subject",
    )
