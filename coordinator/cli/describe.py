"""Describe one job, node, service or loan in full, with the reasons for its state.

The sentences under *why* are the coordinator's own, from the state that its decisions use.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator

from msgspec import Struct, UnsetType
from rich.text import Text

from common.api import (
    ArrayRow,
    ClosedRow,
    Describe,
    Description,
    JobRow,
    LoanRow,
    NodeRow,
    ServiceRow,
    UnknownLoadRow,
    WindowRow,
)
from common.model import FINAL_JOB_STATES, NODE_FIELDS, Gate, JobSpec
from common.node_labels import label_text
from coordinator import plain_text
from coordinator.cli import columns, render, telemetry
from coordinator.cli.output import Format, Show, put, put_json, put_one
from coordinator.cli.output import fields as plain_fields
from coordinator.cli.session import Session
from coordinator.policies.contract.text import counted

Pairs = list[tuple[str, str]]


def ask(session: Session, kind: str, name: str) -> Description:
    """Everything about one thing; errors as `Client.ask`."""
    return session.ask(Describe(kind=kind, name=name, in_full=kind in ("job", "node")), Description)


def describe(session: Session, show: Show, kind: str, name: str) -> None:
    """Print one object in full: its fields, its parts, the reasons, and its events."""
    found = ask(session, kind, name)
    if put_one(show, "description", found, found.name):
        return
    now_s = session.clock.wall_s()
    width = session.out.width
    put(session, _facts(found, now_s, is_wide=show.form == Format.WIDE))
    if found.telemetry is not None and found.telemetry.gpus:
        is_wide, of = show.form == Format.WIDE, found.telemetry.gpus
        table = render.table(of, telemetry.gpus(), width=width, is_wide=is_wide)
        put(session, ["", *table, ""])
    if found.workers:
        put(session, ["", *render.table(found.workers, columns.worker_rows(), width=width)])
    if found.nodes:
        put(session, ["", *render.table(found.nodes, columns.nodes_of_service(), width=width)])
    if found.loans:
        put(session, ["", *render.table(found.loans, columns.loans(now_s), width=width), ""])
    put(session, _why(found))
    if found.story:
        put(session, ["", *render.table(found.story, columns.events(now_s), width=width)])


def explain(session: Session, show: Show, kind: str, name: str) -> None:
    """Print why one thing is where it is: all blockers, the estimate and its source, its story."""
    found = ask(session, kind, name)
    if show.form == Format.JSON:
        reasons = {"kind": found.kind, "name": found.name, "why": found.why}
        waited = {} if found.job is None else {"waited_s": found.job.waited_s}
        story = plain_fields(found.story)
        put_json({"explanation": {**reasons, **waited, "estimate": found.estimate, "story": story}})
        return
    if show.form == Format.NAME:
        put(session, [found.name])
        return
    put(session, explanation(found, session.clock.wall_s(), width=session.out.width))


def explanation(found: Description, now_s: float, *, width: int) -> list[Text]:
    """All blockers of one thing, the estimate and its source, and its story, in lines."""
    said = [_headline(found), *_why(found), *_waits(found)]
    lines = [line if isinstance(line, Text) else Text(line) for line in said]
    if found.story:
        lines += [Text(), *render.table(found.story, columns.events(now_s), width=width)]
    return lines


def _headline(found: Description) -> Text:
    row = found.job or found.node or found.loan
    state = ""
    match row:
        case JobRow():
            state = plain_text.job_state(row)
        case NodeRow():
            state = plain_text.role(row)
        case LoanRow():
            state = row.state
        case None:
            state = f"in mode {found.service.mode}" if found.service else ""
    return Text(f"{found.kind} {found.name} is {state}".removesuffix(" is "), style="bold")


def _why(found: Description) -> Iterator[Text | str]:
    for reason in found.why:
        yield f"- {plain_text.plain(reason)}"
    if found.estimate:
        yield f"- estimate: {plain_text.plain(found.estimate)}"
    has_ended = found.job is not None and found.job.state in FINAL_JOB_STATES
    if not found.why and not found.estimate and not has_ended:  # of an end the story has it all
        yield "- nothing more is known"


def _waits(found: Description) -> Iterator[str]:
    """How long for what, also of a job that has ended; `describe` has it among its facts."""
    if found.job is not None and found.job.waited_s:
        yield f"- up to now it has waited for: {plain_text.plain(_waited(found.job))}"


def _facts(found: Description, now_s: float, *, is_wide: bool) -> Iterator[Text | str]:
    pairs: Pairs = []
    if found.job is not None:
        pairs += _job(found.job, now_s)
    if found.spec is not None:
        pairs += _spec(found.spec, is_wide=is_wide)
    if found.node is not None:
        pairs += _node(found.node)
    if found.telemetry is not None:
        pairs += telemetry.facts(found.telemetry)
    if is_wide:
        pairs += _agent(found)
    if found.service is not None:
        pairs += _service(found.service, now_s)
    if found.loan is not None:
        pairs += _loan(found.loan)
    width = max((len(name) for name, _ in pairs), default=0)
    for name, value in pairs:
        line = Text()
        line.append(f"{name:<{width}}  ", style="bold")
        line.append(plain_text.plain(value) or plain_text.MISSING)
        yield line


def _array(row: JobRow) -> Pairs:
    """The tasks of an array by state, with their indices; of a task, its array."""
    if isinstance(row.array_id, str):
        return [("array", f"{row.array_id}, task {row.array_index}")]
    array = row.array
    if not isinstance(array, ArrayRow):
        return []
    once = "no bound" if array.throttle is None else str(array.throttle)
    pairs = [
        ("tasks", f"{array.tasks}: {plain_text.tasks(array, is_held=row.gate == Gate.HELD)}"),
        ("at once", once),
        ("indices", array.indices),
    ]
    return pairs + [(state, _cut(text)) for state, text in array.ranges.items()]


MOST_RANGES = 200
"""Characters of the indices of one state; -o json has all."""


def _cut(text: str) -> str:
    return text if len(text) <= MOST_RANGES else text[:MOST_RANGES].rpartition(",")[0] + ",..."


OF_ONE_JOB = frozenset(
    {"nodes", "attempt", "progress", "resize cost", "gpu-s lost", "failure", "waited for"}
)
"""Facts of one job that an array does not have."""


def _job(row: JobRow, now_s: float) -> Pairs:
    pairs = _job_facts(row, now_s)
    if isinstance(row.array, ArrayRow):
        return [pair for pair in pairs if pair[0] not in OF_ONE_JOB]
    return pairs


def _job_facts(row: JobRow, now_s: float) -> Pairs:
    return [
        ("job", row.job_id),
        ("number", str(row.number) if isinstance(row.number, int) else ""),
        *_array(row),
        ("name", row.name),
        ("owner", f"{row.tenant}/{row.user}"),
        ("state", _state(row)),
        ("workers", plain_text.workers(row)),
        ("gpus", f"{row.gpus} held, {row.gpus_per_worker} per worker"),
        ("nodes", ", ".join(row.nodes)),
        ("submitted", _when(row.submitted_at_s, now_s)),
        ("started", _when(row.started_at_s, now_s)),
        ("finished", _when(row.finished_at_s, now_s)),
        ("queued", plain_text.duration(row.queueing_s)),
        ("attempt", str(row.attempt)),
        ("preemptions", str(row.preemption_count)),
        ("progress", _steps(row)),
        ("resize cost", _known(row.resize_cost_s, " s")),
        ("gpu-s lost", _known(row.lost_gpu_s)),
        ("exit code", plain_text.number(row.exit_code)),
        ("error", row.error),
        ("failure", _failure(row)),
        ("waited for", _waited(row)),
    ]


def _state(row: JobRow) -> str:
    if not isinstance(row.stalled_s, float):
        return row.state
    return f"{row.state}, STALLED for {plain_text.duration(row.stalled_s)}"


def _known(value: float | UnsetType | None, unit: str = "") -> str:
    return f"{plain_text.number(value)}{unit}" if isinstance(value, float) else ""


def _failure(row: JobRow) -> str:
    """The latest failure, its effect on another try, and the party at fault."""
    if row.failure is None:
        return ""
    origins = " or ".join(row.failure.origins)
    who = f"; who has to look: {origins}" if origins else ""
    return f"{row.failure}; retry: {row.failure.retry}{who}"


def _waited(row: JobRow) -> str:
    """How long for what, where its policy distinguishes that."""
    kinds = sorted(row.waited_s.items())
    return ", ".join(f"{kind} {plain_text.duration(spent_s)}" for kind, spent_s in kinds)


def _spec(spec: JobSpec, *, is_wide: bool) -> Pairs:
    checkpoint = spec.checkpoint
    saves = (
        f"{checkpoint.path} (grace {plain_text.duration(checkpoint.grace_s)}, {checkpoint.signal})"
    )
    pairs = [
        ("command", shlex.join(spec.command)),
        ("rendezvous", _store(spec)),
        ("workdir", spec.workdir),
        ("gpu types", ", ".join(spec.gpu.types) or "any"),
        ("priority", str(spec.priority)),
        ("preemptibility", str(spec.preemptibility)),
        ("checkpoint", saves if checkpoint.path else "never"),
        *_limits(spec),
    ]
    if is_wide:
        # The environment may hold secrets: shown only on request.
        pairs += [(f"env {name}", value) for name, value in sorted(spec.env.items())]
    return pairs


def _limits(spec: JobSpec) -> Pairs:
    """Only those that it has."""
    found = {
        "time limit": spec.time_limit_s,
        "deadline": spec.deadline_s,
    }
    pairs = [(name, plain_text.duration(value)) for name, value in found.items() if value]
    if spec.depends_on:
        pairs.append(("after", " ".join(f"{each.when}:{each.job}" for each in spec.depends_on)))
    asked = [(name, getattr(spec, name)) for name in NODE_FIELDS]
    return [*pairs, *((name.replace("_", " "), ", ".join(each)) for name, each in asked if each)]


def _store(spec: JobSpec) -> str:
    """The process that keeps the rendezvous when no launcher does."""
    if spec.rendezvous.command:
        return shlex.join(spec.rendezvous.command)
    return "a TCPStore of PyTorch" if spec.has_store else "on worker 0"


def _node(row: NodeRow) -> Pairs:
    return [
        ("node", row.node),
        ("pool", row.home_pool),
        ("role", f"{plain_text.role(row)}, wanted {row.desired_role}"),
        ("service", row.service),
        ("gpus", f"{row.gpus_held} of {row.gpus} {row.gpu_type} held"),
        ("busy", plain_text.percent(row.gpu_busy_ratio)),
        *_node_closed(row),
        *_node_window(row),
        *_node_load(row),
        ("heard", plain_text.heard(row)),
        ("rack", row.rack),
        ("labels", _labels(row)),
        ("jobs", ", ".join(row.jobs)),
        ("detail", row.detail),
    ]


def _labels(row: NodeRow) -> str:
    """Its labels, and which an operator set or took away."""
    labels, ordered = row.labels or {}, row.ordered_labels or {}
    said = [
        f"{label_text(key, labels[key])}{' (operator)' if key in ordered else ''}"
        for key in sorted(labels)
    ]
    gone = [f"no {key} (operator)" for key in sorted(ordered) if ordered[key] is None]
    return ", ".join([*said, *gone])


def _node_closed(row: NodeRow) -> Pairs:
    """Only while it takes nothing new by itself."""
    found = row.closed
    if not isinstance(found, ClosedRow):
        return []
    until = "until that is mended"
    if found.left_s is not None:
        until = f"for {plain_text.duration(found.left_s)} more"
    return [("closed", f"takes nothing new {until}: {found.why}")]


def _node_window(row: NodeRow) -> Pairs:
    """Only while an operator has ordered one that has not begun."""
    if not isinstance(row.window, WindowRow):
        return []
    return [("window", f"{plain_text.closes(row.window)}, ordered {row.window.reason}")]


def _node_load(row: NodeRow) -> Pairs:
    """Only where it is unknown: a node's known load is part of its telemetry."""
    found = row.load_unknown
    if not isinstance(found, UnknownLoadRow):
        return []
    last = plain_text.number(found.last_load_per_s)
    since = plain_text.duration(found.unknown_s)
    return [("load", f"unknown for {since}, last known {last} requests/s: {found.why}")]


def _agent(found: Description) -> Pairs:
    """The state of a node's agent; every count should stay near zero."""
    pairs: Pairs = []
    if found.agent is not None:
        counts = plain_fields(found.agent)
        pairs += [(f"agent {name.replace('_', ' ')}", str(counts[name])) for name in counts]
    if found.cost is not None:
        rss = f"{found.cost.rss_bytes / 2**20:.0f} MiB"
        pairs.append(("agent cost", f"{plain_text.duration(found.cost.cpu_s)} of CPU, {rss}"))
    failed = [f"{one.name}: {one.error}" for one in found.collectors if not one.is_success]
    return [*pairs, ("collectors", "; ".join(failed) or "all well")] if found.collectors else pairs


def _service(row: ServiceRow, now_s: float) -> Pairs:
    return [
        ("service", row.service),
        ("mode", f"{row.mode} (recalled)" if row.is_recalled else str(row.mode)),
        ("nodes", f"{row.nodes}: {row.serving} serving, {row.on_loan} on loan, "
                  f"{row.coming_home} coming home"),
        ("load", _load(row)),
        ("capacity", f"{plain_text.number(row.capacity_per_node)} requests/s per node"),
        ("at least", f"{row.min_serving} serving"),
        ("deadline", f"{plain_text.duration(row.reclaim_deadline_s)} from reclaim to serving"),
        ("return", f"{plain_text.duration(row.return_s)} expected at most"),
        ("requests", _in_flight(row)),
        ("reclaims", _reclaims(row, now_s)),
        *_lapses(row),
        *_turn_backs(row),
    ]  # fmt: skip


def _load(row: ServiceRow) -> str:
    """Its load, and since when and why it is unknown where it is."""
    said = f"{plain_text.number(row.load_per_s)} requests/s"
    found = row.load_unknown
    if not isinstance(found, UnknownLoadRow):
        return said
    serving = counted(found.serving, "serving node")
    return (
        f"last known {said}; unknown of {len(found.nodes)} of {serving} for "
        f"{plain_text.duration(found.unknown_s)}: {found.why}"
    )


def _in_flight(row: ServiceRow) -> str:
    if row.running_requests is None:
        return "no server reports its load"
    waiting = plain_text.number(row.waiting_requests)
    return f"{plain_text.number(row.running_requests)} running, {waiting} waiting"


def _reclaims(row: ServiceRow, now_s: float) -> str:
    """How far the promise of its deadline was kept, as far back as loans are remembered."""
    if not row.reclaims:
        return "none yet"
    counts = f"{row.reclaims}, {row.reclaims_late} late"
    if row.last_reclaim_s is None:
        return f"{counts}; none is home yet"
    last = plain_text.duration(row.last_reclaim_s)
    ago = plain_text.ago(row.last_returned_at_s, now_s)
    return f"{counts}; the last took {last}, home {ago}"


def _lapses(row: ServiceRow) -> Pairs:
    """Shown only where a lease ended by itself, because that is rare."""
    return [("lapses", f"{row.lapses}, {row.lapses_late} late")] if row.lapses else []


def _turn_backs(row: ServiceRow) -> Pairs:
    """Only where a node gave a loan up, for the same reason."""
    late = f"{row.turn_backs}, {row.turn_backs_late} late"
    return [("turned back", late)] if row.turn_backs else []


def _loan(row: LoanRow) -> Pairs:
    return [
        ("loan", row.lease_id),
        ("node", row.node),
        ("service", row.service),
        ("state", f"{row.state} LATE" if row.is_late else row.state),
        ("decided", plain_text.instant(row.decided_at_s)),
        ("begun", plain_text.instant(row.begun_at_s)),
        ("reclaimed", plain_text.instant(row.reclaim_ordered_at_s)),
        ("returned", plain_text.instant(row.returned_at_s)),
        ("took", _took(row)),
        ("preemptions", _both(row.predicted_preemptions, row.realised_preemptions)),
        ("gpu-s lost", _both(row.predicted_cost_gpu_s, row.realised_cost_gpu_s)),
    ]


def _both(predicted: float, realised: float) -> str:
    return f"{plain_text.number(predicted)} predicted, {plain_text.number(realised)} realised"


def _when(at_s: float | None, now_s: float) -> str:
    return "" if at_s is None else f"{plain_text.instant(at_s)} ({plain_text.ago(at_s, now_s)})"


def _steps(row: JobRow) -> str:
    if row.step is None:
        return ""
    return f"step {row.step}" + (f" of {row.total_steps}" if row.total_steps else "")


class Hit(Struct, frozen=True, kw_only=True):
    """A job that an order would stop, wholly or in part, on some nodes."""

    row: JobRow
    nodes: tuple[str, ...]


def hits(jobs: tuple[JobRow, ...], nodes: set[str]) -> list[Hit]:
    """The jobs with workers on these nodes: what an order against the nodes would hit."""
    found = [Hit(row=row, nodes=tuple(sorted(nodes.intersection(row.nodes)))) for row in jobs]
    return [hit for hit in found if hit.nodes]


def _took(row: LoanRow) -> str:
    """How long a reclaim took against its deadline; nothing was promised without one."""
    if row.lapse_s is not None:
        within = row.lapse_deadline_s
        of = "" if within is None else f" of {plain_text.duration(within)}"
        return f"{plain_text.duration(row.lapse_s)}{of} since its lease ended by itself"
    if row.turn_back_s is not None:
        within = row.turn_back_deadline_s
        of = "" if within is None else f" of {plain_text.duration(within)}"
        return f"{plain_text.duration(row.turn_back_s)}{of} since its node turned back"
    if row.reclaim_deadline_s is None:
        return "-"
    if row.reclaim_s is None and row.returned_at_s is not None:
        return "- (called back before its node had left)"
    return f"{plain_text.duration(row.reclaim_s)} of {plain_text.duration(row.reclaim_deadline_s)}"


def hit_line(hit: Hit) -> str:
    """A hit as a person should read it before saying yes."""
    row = hit.row
    on = ", ".join(hit.nodes)
    elsewhere = len(row.nodes) - len(hit.nodes)
    rest = f" (and on {counted(elsewhere, 'other node')})" if elsewhere else ""
    return (
        f"  {row.job_id} {plain_text.plain(row.name)} of {row.tenant}/{row.user}: {row.state}, "
        f"{row.gpus} {'GPU' if row.gpus == 1 else 'GPUs'}, on {on}{rest}"
    )
