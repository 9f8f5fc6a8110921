"""The answer to a plan: what differs between the run with the change and the one without it."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator

from msgspec import UNSET

from common.model import JobId, NodeName
from common.plans import (
    Plan,
    PlanEffect,
    PlanEnd,
    PlanKind,
    PlanMove,
    Planned,
    PlanStart,
    PlanStep,
    PlanTurn,
)
from coordinator.engine.jobs.start_gate import gated
from coordinator.engine.state.tables import LoanEntry
from coordinator.engine.what_if import WhatIf
from coordinator.plan.decide import Change, change_of
from coordinator.plan.run import Noted, Run, Stop, ends, unstarted
from coordinator.plan.words import step_row, whose_job
from coordinator.policies.contract.text import counted

LATER_KEPT = 50
"""Rows of the time after the first instant; the next thousand say nothing new."""
ENDS_KEPT = 5
EFFECTS = ("preempted", "shrinks", "does not start", "starts later", "starts earlier")
TURNS_KEPT = 2000
EFFECTS_KEPT = 2000
"""Some 300 kB; a message carries a megabyte."""
SAME_S = 1.0
"""Two instants that differ by no more are the same for a reader."""
BASE_SHARE = 0.4
"""Share of the time limit for the run without the change."""


def answer(question: WhatIf, *, clock_s: Callable[[], float]) -> Planned:
    """Play both runs and compare them.

    Args:
        clock_s: a clock that runs on; the request limits how long the playing takes.

    Raises:
        ConfigError: the change names a setting or a policy that cannot be.
    """
    request, began_s = question.request, clock_s()
    change = change_of(question)
    drained = NodeName(request.target) if request.kind == PlanKind.DRAIN else None
    changed = Run(question, change, drained=drained)
    refused = "; ".join(one.why for one in changed.decided.refused if one.decision is change.loan)
    if refused:
        return Planned(kind=request.kind, target=request.target, refused=refused)

    def is_over(share: float) -> Callable[[], bool]:
        return lambda: clock_s() - began_s >= share * request.limit_s

    if not question.has_change:  # the two runs are one
        changed.play(
            request.horizon_s,
            is_over=is_over(1.0),
            is_done=lambda run: run.is_settled or bool(run.own_starts),
        )
        return compare(request, changed, changed, took_s=clock_s() - began_s)
    base = Run(question, Change(settings=question.settings))
    base.play(request.horizon_s, is_over=is_over(BASE_SHARE), is_done=lambda run: run.is_settled)
    changed.play(request.horizon_s, is_over=is_over(1.0), is_done=lambda run: _is_done(run, base))
    return compare(request, base, changed, took_s=clock_s() - began_s)


def _is_done(run: Run, base: Run) -> bool:
    """True if all jobs run, all nodes have arrived and the other run knows no more."""
    is_away = any(_is_moving(loan) for loan in run.state.loans.values())
    is_full = run.drained_is_held
    return run.is_settled and not is_away and not is_full


def _is_moving(loan: LoanEntry) -> bool:
    if loan.returned_at_s is not None:
        return False
    return loan.begun_at_s is None or loan.reclaim_ordered_at_s is not None


def compare(request: Plan, base: Run, changed: Run, *, took_s: float) -> Planned:
    """The rows that only the run with the change has."""
    now, later = _steps(base, changed)
    start = _start(changed) if request.kind == PlanKind.JOB else None
    is_queue = request.kind == PlanKind.QUEUE
    turns = tuple(_turns(changed)) if is_queue else ()
    return Planned(
        kind=request.kind,
        target=request.target,
        now=now,
        later=later,
        start=start,
        effects=tuple(sorted(_effects(base, changed), key=_weight)[:EFFECTS_KEPT]),
        moves=tuple(_moves(base, changed, request)),
        warnings=changed.never,
        played_s=changed.played_s,
        took_s=took_s,
        assumptions=_assumptions(request, base, changed),
        turns=turns[:TURNS_KEPT] if is_queue else UNSET,
        turns_cut=(len(turns[TURNS_KEPT:]) or UNSET) if is_queue else UNSET,
        number=(changed.own_number or UNSET) if request.in_full is True else UNSET,
    )


# --- steps --------------------------------------------------------------------------------------


def _steps(base: Run, changed: Run) -> tuple[tuple[PlanStep, ...], tuple[PlanStep, ...]]:
    """The steps of the first instant, and those after it, that the other run does not have."""
    usual = [step_row(step, base.jobs) for step in base.steps]
    usual_now = Counter(_same(row) for row in usual if row.in_s == 0)
    usual_ever = Counter((row.action, row.subject) for row in usual)
    now: list[PlanStep] = []
    later: list[PlanStep] = []
    for step in changed.steps:
        row = step_row(step, changed.jobs)
        key = (row.action, row.subject)
        if row.in_s == 0:
            if usual_now[_same(row)] == 0:
                now.append(row)
            usual_now[_same(row)] -= 1
        elif usual_ever[key] <= 0 and _is_shown(row, changed) and row.in_s <= base.played_s:
            later.append(row)
        usual_ever[key] -= 1
    now += _silent_stops(base, changed, {row.subject for row in now})
    return tuple(now), tuple(later[:LATER_KEPT])


def _is_shown(row: PlanStep, run: Run) -> bool:
    """Whether a later step says more than the rows of jobs: no start that has merely moved."""
    if row.action in ("grow", "shrink"):
        return False
    noted = run.jobs.get(JobId(row.subject))
    return row.action != "start" or (noted is not None and bool(noted.stops))


def _same(row: PlanStep) -> tuple[str, str, str]:
    return row.action, row.subject, row.what


def _silent_stops(base: Run, changed: Run, named: set[str]) -> Iterator[PlanStep]:
    """Jobs that an order stops or shrinks at once; that is no decision of its own."""
    for noted in changed.jobs.values():
        first = _first_stop(noted)
        usual = base.jobs.get(noted.job_id)
        is_usual = usual is not None and (
            noted.shrunk_by <= usual.shrunk_by if first is None else _first_stop(usual) is not None
        )
        if noted.job_id in named or is_usual or (first is None and not noted.shrunk_by):
            continue
        fewer = f"{counted(noted.shrunk_by, 'worker')} fewer"
        yield PlanStep(
            in_s=0.0,
            action="shrink" if first is None else "stop",
            subject=noted.job_id,
            whose=whose_job(noted),
            what=fewer if first is None else f"loses {first.lost_gpu_s:.0f} GPU-s",
            reason="" if first is None else first.reason,
        )


def _first_stop(noted: Noted) -> Stop | None:
    """Its stop in the first instant."""
    return next((stop for stop in noted.stops if stop.in_s == 0), None)


# --- the job in question ------------------------------------------------------------------------


def _start(run: Run) -> PlanStart:
    """The first start of the job, or of the tasks of an array."""
    waits_for = run.waits_for
    noted = min(run.own_starts, key=lambda one: one.starts[0], default=None)
    if noted is None:
        return PlanStart(waits_for=waits_for, unknown=_unknown(run))
    in_s = noted.starts[0]
    # A start may be decided as the workers before it are on their way out.
    ended = ends(run, before_s=in_s + SAME_S) if in_s else []
    before = [one for one in ended if not run.is_own(one.job_id)]
    there = [one for one in before if set(one.nodes) & set(noted.nodes)]
    return PlanStart(
        in_s=in_s,
        gpus=noted.gpus,
        nodes=tuple(map(str, noted.nodes)),
        after=tuple(_end(one) for one in (there or before)[-ENDS_KEPT:]),
        waits_for=waits_for if in_s else (),
    )


def _turns(run: Run) -> Iterator[PlanTurn]:
    """The first start of each job and array that waits, in the order of the starts."""
    told: set[str] = set()
    started = [one for one in run.jobs.values() if one.was_waiting and one.starts]
    for noted in sorted(started, key=lambda one: (one.starts[0], one.job_id)):
        array_id = JobId(noted.job_id.rpartition("_")[0])
        job_id = array_id if array_id in run.state.arrays else noted.job_id
        if job_id not in told:
            told.add(job_id)
            yield PlanTurn(
                job_id=job_id,
                name=noted.name,
                tenant=noted.tenant,
                in_s=noted.starts[0],
                gpus=noted.gpus,
                nodes=tuple(map(str, noted.nodes)),
            )


def _unknown(run: Run) -> str:
    """Why no start is predicted, where playing on would not help."""
    holders = [one for one in run.jobs.values() if one.worker_count and not run.is_own(one.job_id)]
    if run.never:
        return "no node of the fleet as it is can run it"
    own = gated(run.state, run.own)
    if own is not None and own.gate.held_by:
        return "it is held until a person releases it"
    if own is not None and own.gate.never:
        return "a dependency of it can never hold"
    if own is not None and not all(map(run.moves, own.gate.depends_on)):
        return "what it depends on is held, cannot run, or has no estimate of its end"
    if holders and not any(one.source for one in holders):
        return "no running job has an estimate of its end"
    return ""


def _end(noted: Noted) -> PlanEnd:
    return PlanEnd(
        job_id=noted.job_id,
        name=noted.name,
        tenant=noted.tenant,
        in_s=noted.ended_in_s or 0.0,
        source=noted.source,
    )


# --- jobs that the change affects ---------------------------------------------------------------


def _effects(base: Run, changed: Run) -> Iterator[PlanEffect]:
    for job_id in {**base.jobs, **changed.jobs}:
        if changed.is_own(job_id):
            continue
        noted = changed.jobs.get(job_id) or unstarted(base.jobs[job_id])
        usual = base.jobs.get(job_id) or unstarted(noted)
        stops = noted.stops[len(usual.stops) :]
        if stops:
            stop = stops[0]
            again = next((start for start in noted.starts if start > stop.in_s), None)
            yield _effect(
                noted,
                "preempted",
                in_s=stop.in_s,
                lost_gpu_s=stop.lost_gpu_s,
                again_in_s=again,
            )
        elif noted.shrunk_by > usual.shrunk_by:
            yield _effect(noted, "shrinks", in_s=0.0)
        elif noted.was_waiting:
            yield from _moved_start(noted, usual, base, changed)


def _weight(effect: PlanEffect) -> tuple[int, float, str]:
    """Who loses work first, then who waits longest."""
    rank = EFFECTS.index(effect.what)
    return rank, -max(effect.lost_gpu_s, effect.later_s), effect.job_id


def _moved_start(noted: Noted, usual: Noted, base: Run, changed: Run) -> Iterator[PlanEffect]:
    """Whether a waiting job starts at another time, as far as both runs were played."""
    was_s = usual.starts[0] if usual.starts else None
    now_s = noted.starts[0] if noted.starts else None
    if was_s is not None and now_s is not None and abs(now_s - was_s) > SAME_S:
        what = "starts later" if now_s > was_s else "starts earlier"
        yield _effect(noted, what, in_s=now_s, later_s=now_s - was_s)
    elif was_s is not None and now_s is None and changed.played_s > was_s + SAME_S:
        yield _effect(noted, "does not start", later_s=changed.played_s - was_s)
    elif was_s is None and now_s is not None and base.played_s > now_s + SAME_S:
        yield _effect(noted, "starts earlier", in_s=now_s, later_s=now_s - base.played_s)


def _effect(
    noted: Noted,
    what: str,
    *,
    in_s: float | None = None,
    lost_gpu_s: float = 0.0,
    later_s: float = 0.0,
    again_in_s: float | None = None,
) -> PlanEffect:
    return PlanEffect(
        job_id=noted.job_id,
        name=noted.name,
        tenant=noted.tenant,
        what=what,
        in_s=in_s,
        lost_gpu_s=lost_gpu_s,
        later_s=later_s,
        again_in_s=again_in_s,
    )


# --- nodes that move ----------------------------------------------------------------------------


def _moves(base: Run, changed: Run, request: Plan) -> Iterator[PlanMove]:
    if request.kind == PlanKind.DRAIN:
        yield PlanMove(
            node=request.target, to="empty", in_s=changed.empty_in_s, source="stops and graces"
        )
    usual = {(loan.node, to) for loan, to in _under_way(base)}
    for loan, to in _under_way(changed):
        if (loan.node, to) not in usual:
            yield _move(changed, loan, to)


def _under_way(run: Run) -> list[tuple[LoanEntry, str]]:
    """Loans that began or were called back since the question."""
    found: list[tuple[LoanEntry, str]] = []
    for loan in run.state.loans.values():
        if (loan.reclaim_ordered_at_s or 0.0) >= run.began_s:
            found.append((loan, "serving"))
        elif loan.decided_at_s >= run.began_s:
            found.append((loan, "on loan"))
    return found


def _move(run: Run, loan: LoanEntry, to: str) -> PlanMove:
    is_home = to == "serving"
    at_s = loan.returned_at_s if is_home else loan.begun_at_s
    in_s = None if at_s is None else at_s - run.began_s
    node = run.state.nodes[loan.node]
    delays = run.lengths.of(node)
    stages_s: dict[str, float] = {}
    if is_home and at_s is not None and loan.reclaim_ordered_at_s is not None:
        way_s = at_s - loan.reclaim_ordered_at_s
        after_s = delays.device_free_s + delays.warm_up_s
        stages_s = {
            "stop": max(0.0, way_s - after_s),
            "device_free": delays.device_free_s,
            "server_ready": delays.warm_up_s,
        }
    elif not is_home:
        stages_s = {"drain": delays.drain_s}
    return PlanMove(
        node=loan.node,
        service=loan.service,
        to=to,
        in_s=in_s,
        stages_s=stages_s,
        source=run.lengths.source(loan.service),
        deadline_s=loan.reclaim_deadline_s,
    )


# --- what it rests on ---------------------------------------------------------------------------


def _assumptions(request: Plan, base: Run, changed: Run) -> tuple[str, ...]:
    jobs = changed.jobs.values()
    known = sum(bool(one.source) for one in jobs)
    said = [f"{known} of {counted(len(jobs), 'job')} end by their estimates or time limits"]
    if known < len(jobs):
        said[0] += ", the others have neither and go on"
    if base.state.services:
        said.append("the load of each service stays as it was measured last")
    said.append("no other job is submitted, and no node fails")
    runs = {"the run without the change": base, "the run with it": changed}
    if base is changed:
        runs = {"the run": base}
    cut = [f"{what} {run.played_s:.0f} s ahead" for what, run in runs.items() if run.is_cut]
    if cut:
        ended = " and ".join(cut)
        said.append(
            f"the limit of {request.limit_s:g} s ended {ended}; "
            "`aryl --timeout S plan` gives it more"
        )
    return tuple(said)
