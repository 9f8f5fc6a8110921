"""What happened in a journal: where a span of it begins, its facts from outside, how jobs ended.

The journal is decided again, record by record, so that the state at any instant is the real one.
"""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
from msgspec import Struct, field

from common.errors import ConfigError
from common.model import FINAL_JOB_STATES, JobId, JobState
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.record import Entry, Record, decision_bytes
from coordinator.engine.state.events import ProgressReported
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState, JobEntry
from coordinator.policies.contract.decisions import Decision
from coordinator.policies.policy import knobs_of
from coordinator.policies.registry import every as every_policy
from coordinator.policies.registry import policy as policy_of


class End(Struct, frozen=True, kw_only=True):
    """How a job ended.

    work_s: its whole work in worker-seconds of the reference GPU type, as its last attempt shows.
    """

    state: JobState
    work_s: float
    exit_code: int | None


class Story(Struct, kw_only=True):
    """A span of a journal.

    settings, before: at its beginning. entries: its facts. after: the state at its end.
    ends: of jobs that ended in it. is_telling: whether most of them reported progress.
    differences: records that are decided otherwise by the code that is here.
    """

    settings: EngineSettings
    before: bytes
    began_s: float
    ended_s: float
    entries: list[Entry] = field(default_factory=list[Entry])
    after: ClusterState
    ends: dict[JobId, End] = field(default_factory=dict[JobId, End])
    is_telling: bool = False
    records: int = 0
    differences: int = 0

    def engine(self, settings: EngineSettings) -> Engine:
        """An engine that finds the cell as it was, with settings perhaps of another kind."""
        return Engine(settings, decode_state(self.before))


class _Reader:
    """Decides a journal again and notes what the span in question needs."""

    def __init__(self, since_s: float, until_s: float) -> None:
        self.engine = Engine(EngineSettings())
        self.entries: list[Entry] = []
        self.ends: dict[JobId, End] = {}
        self.before: tuple[EngineSettings, bytes] | None = None
        self.records = self.differences = 0
        self.telling: set[JobId] = set()
        self._since_s, self._until_s = since_s, until_s
        self._live: set[JobId] = set()
        self._seen: tuple[int, JobId | None] = (-1, None)

    def take(self, record: Record) -> bool:
        """Take one record; False once it is behind the span."""
        decided: list[Decision] = []
        for entry in record.entries:
            if entry.now_s > self._until_s:
                return False
            if entry.now_s >= self._since_s and self.before is None:
                self.before = (self.engine.settings, self.engine.encode_state())
                self._live = set(self.engine.state.live_jobs)
            decided += self.engine.handle(entry.event, now_s=entry.now_s).decisions
            if self.before is not None:
                self.entries.append(entry)
                self._note(entry)
        self.records += 1
        self.differences += decision_bytes(tuple(decided)) != decision_bytes(record.decisions)
        return True

    def _note(self, entry: Entry) -> None:
        if isinstance(entry.event, ProgressReported) and entry.event.progress is not None:
            self.telling.add(entry.event.job_id)
        now_live = self.engine.state.live_jobs
        seen = (len(now_live), next(reversed(now_live), None))
        if seen == self._seen:
            return  # an event that both begins and ends jobs begins the last one
        self._seen = seen
        for job_id in self._live.difference(now_live):
            job = self.engine.state.jobs.get(job_id)
            if job is not None and job.state in FINAL_JOB_STATES:
                self.ends[job_id] = End(
                    state=job.state, work_s=_whole_work_s(job), exit_code=job.exit_code
                )
        self._live = set(now_live)


def read(
    records: Iterable[tuple[int, Record]], *, since_s: float = 0.0, until_s: float = float("inf")
) -> Story:
    """The span of a journal from one instant to another, Unix time.

    Raises:
        ConfigError: the journal has lost its first records, or has none in this span.
    """
    reader = _Reader(since_s, until_s)
    is_first = True
    for sequence, record in records:
        if is_first and record.number != 1:
            raise ConfigError(
                f"journal: it begins with record {record.number} at sequence {sequence}; a replay "
                "needs all records (journal_kept_days = 0)"
            )
        is_first = False
        if not reader.take(record):
            break
    if reader.before is None:
        raise ConfigError("journal: it has no record in this span (--since, --until)")
    settings, before = reader.before
    ended = [job_id for job_id, end in reader.ends.items() if end.state == JobState.SUCCEEDED]
    return Story(
        settings=settings,
        before=before,
        began_s=reader.entries[0].now_s,
        ended_s=reader.entries[-1].now_s,
        entries=reader.entries,
        after=reader.engine.state,
        ends=reader.ends,
        is_telling=2 * len(reader.telling & set(ended)) > len(ended),
        records=reader.records,
        differences=reader.differences,
    )


def _whole_work_s(job: JobEntry) -> float:
    """The work of its last attempt, and of the saved work that it began with."""
    total = None if job.progress is None else job.progress.total_steps
    began = job.attempt.start_step / total if total else 0.0
    return job.clock.worker_s / (1.0 - min(0.99, began))


def check_changes(policy: str, changes: dict[str, str]) -> None:
    """Refuse what no journal's settings could take, before one is read.

    The value of a knob is checked where its policy is named.

    Raises:
        ConfigError: names the option and the setting or the knob, and what was expected.
    """
    types = {field.name: field.type for field in msgspec.structs.fields(EngineSettings)}
    turned = {name: value for name, value in changes.items() if name not in types}
    if policy:
        try:
            policy_of(policy)
        except ConfigError as error:
            raise ConfigError(f"--policy: {str(error).removeprefix('policy: ')}") from None
    made = [policy_of(policy)] if policy else list(every_policy().values())
    knobs = {name for each in made for name in knobs_of(each)}
    for name, value in changes.items():
        if name == "policy":
            raise ConfigError("--set: policy is no value to set; --policy names another one")
        if name in turned and name not in knobs:
            whose = f"of {policy}" if policy else "of a policy"
            raise ConfigError(
                f"--set: {name!r}, expected a setting of [engine] or a knob {whose} (aryl policies)"
            )
        if name in types:
            _check_value(name, value, types[name])
    if policy and turned:
        try:
            policy_of(":".join((policy, *(f"{name}={value}" for name, value in turned.items()))))
        except ConfigError as error:
            raise ConfigError(f"--set: {str(error).removeprefix('policy: ')}") from None


def _check_value(name: str, value: str, kind: object) -> None:
    try:
        msgspec.convert(value, kind, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {name}={value}: {error}") from None


def with_changes(
    settings: EngineSettings, *, policy: str, changes: dict[str, str]
) -> EngineSettings:
    """Settings with another policy, and with values by name: of a setting, else of a knob.

    Raises:
        ConfigError: names the setting or the knob, and what was expected.
    """
    text = policy or settings.policy
    values: dict[str, object] = {}
    for name, value in changes.items():
        if name in EngineSettings.__struct_fields__:
            values[name] = value
        else:
            text += f":{name}={value}"
    policy_of(text)
    plain = {**msgspec.to_builtins(settings), **values, "policy": text}
    try:
        return msgspec.convert(plain, EngineSettings, strict=False)
    except msgspec.ValidationError as error:
        raise ConfigError(f"--set: {error}") from None
