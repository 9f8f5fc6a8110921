"""Runs the workers of this node, each under a shim of its own.

All facts about a worker are in its directory, so a restarted agent knows as much as the one before
it. Directory and sockets: docs/job-contract.md.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
from collections.abc import Collection
from pathlib import Path

import msgspec

from agent.core.state import Refusal
from agent.settings import WORKERS_DIR, AgentSettings, Starter
from agent.shim import control as shim_control
from agent.shim import files as shim_files
from agent.workers.accounts import check_not_root, job_account
from agent.workers.directory import make_directory, remove_directory
from agent.workers.failure_reader import FailureReader
from agent.workers.kept_logs import KeptLogs
from agent.workers.lost import (
    HeldBack,
    HungShims,
    LostWorkers,
    cut_lost,
    has_begun,
    has_file,
    is_shim_silent,
    withdraw,
)
from agent.workers.process_marks import mark_of, marked
from agent.workers.record import (
    MAX_TEXT_CHARS,
    SHIM_LOST,
    WorkerRecord,
    bury,
    directory_name,
    is_passing,
    is_shim_alive,
    key_of,
    lacks_means,
    read_record,
    tail,
)
from agent.workers.reserve_check import OneLook, Refuse, refusal
from agent.workers.runner import WorkerStatus
from agent.workers.spec import (
    LOG_MAX_BYTES,
    Account,
    checkpoint_path,
    search_path,
    shim_spec,
    worker_argv,
)
from agent.workers.starters import DetachedStarter, ShimStarter, SystemdStarter, first_word
from common.clock import Clock
from common.errors import ConfigError, Unavailable
from common.failure_rules import FailureRules, read_rules
from common.faults import Fault
from common.messages import WorkerOrder, WorkerPhase
from common.model import StopReason, WorkerKey

_REASONS: dict[str, StopReason] = {reason.value: reason for reason in StopReason}


class ShimRunner:
    """Workers under shims, one directory each.

    Args:
        run_dir: where the directories are; must outlive the agent and be on a local disk.
        starter: starts the shims.
        kept_logs: where the logs of forgotten workers go; None keeps none.
        account: the account that workers run as; None is the agent's own user. Needs root.
        refuse: checks whether a worker could start here.
        failure_rules: the rules for the logs of failed workers; None reads no log.
        is_root_allowed: let workers run as root; for tests and machines of one person only.
        log_max_bytes: the size at which the log of a worker is cut.
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        clock: Clock,
        starter: ShimStarter,
        kept_logs: KeptLogs | None = None,
        account: Account | None = None,
        refuse: Refuse = refusal,
        is_root_allowed: bool = False,
        failure_rules: FailureRules | None = None,
        log_max_bytes: int = LOG_MAX_BYTES,
    ) -> None:
        self._run_dir = run_dir
        self._clock = clock
        self._starter = starter
        self._kept_logs = kept_logs
        self._account = account
        self._refuse = OneLook(refuse)
        self._is_root_allowed = is_root_allowed
        self._log_max_bytes = log_max_bytes
        self._boot_id = shim_files.boot_id()
        self._hung = HungShims(self._boot_id)
        self._lost = LostWorkers(clock)
        self._held_back = HeldBack()
        self._contact_at_s: float | None = None
        self._told_contact_s: dict[WorkerKey, float] = {}
        self._failures = FailureReader(failure_rules, clock)
        self._named: dict[str, tuple[WorkerKey | None, Path]] = {}
        """The directories of the last look, by name."""

    async def start(self, order: WorkerOrder, *, endpoint: str) -> None:
        """As `WorkerRunner.start`. Two starters of one key, even two agents, get one shim.

        The directory is made once, the shim's lock admits one, and a status on disk admits none.
        """
        directory = self._directory(order.key)
        if order.key in self._held_back or (directory / shim_files.STATUS_FILE).exists():
            return
        self._check_not_root()
        if not has_file(directory, shim_files.SPEC_FILE):  # no shim is starting
            await self._lost.end_all_left(order.key, directory, self._uid(directory))
        place = await asyncio.to_thread(os.path.realpath, directory)
        is_for_a_shim = await asyncio.to_thread(make_directory, directory, self._account)
        spec = shim_spec(
            order,
            endpoint=endpoint,
            directory=place,
            account=self._account,
            home=os.environ.get("HOME", "/"),
            contact_at_s=self._contact_at_s,
            log_max_bytes=self._log_max_bytes,
            mark=mark_of(place),
        )
        path = str(directory / shim_files.SPEC_FILE)
        if is_for_a_shim:
            await asyncio.to_thread(shim_files.write_json, path, spec, is_durable=True)
        try:
            if is_for_a_shim:
                await self._starter.start(directory, order)
            await first_word(order.key, directory, clock=self._clock)
        except Unavailable:
            if not await self._has_begun(order.key, directory):
                raise

    async def _has_begun(self, key: WorkerKey, directory: Path) -> bool:
        """True if a worker whose start gave no first status runs, or ran.

        Its job may have removed the status. If its shim does not answer either, the next look ends
        all that is left of it. Otherwise it is given up: whenever its shim makes progress, a stop
        comes first.
        """
        uid = self._uid(directory)
        if await asyncio.to_thread(marked, directory, uid):
            await self._lost.ask(key, directory, uid)
            return True  # it computes: reported as a failed start, its job would run twice
        try:
            return await self._stop(key, StopReason.STALE, 0.0)
        except Unavailable:  # it cannot be reached, or is not dead yet: a look reports its end
            return True

    def _check_not_root(self) -> None:
        uid = os.geteuid()
        check_not_root(self._account, uid=uid, is_root_allowed=self._is_root_allowed)

    async def stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> None:
        """As `WorkerRunner.stop`."""
        await self._stop(key, reason, grace_s)

    async def _stop(self, key: WorkerKey, reason: StopReason, grace_s: float) -> bool:
        """True if it had begun, and could not be reached; it is dead then, or about to be."""
        now_s = self._clock.now_s()
        self._hung.told_to_stop(key, grace_s, now_s=now_s)
        self._tell(key, {"op": "stop", "reason": reason.value, "grace_s": grace_s})
        directory, boot_id = self._directory(key), self._boot_id
        uid, of_it = self._uid(directory), (key, directory)
        held_back = self._held_back
        is_lost = await asyncio.to_thread(
            withdraw, *of_it, reason, boot_id, now_s, lost=self._lost, held_back=held_back, uid=uid
        )
        if is_lost:
            await self._lost.end_all_left(*of_it, uid)
        return is_lost

    async def resize(self, key: WorkerKey, worker_count: int) -> None:
        """As `WorkerRunner.resize`."""
        self._tell(key, {"op": "resize", "worker_count": worker_count})

    async def pause(self, key: WorkerKey, *, is_suspended: bool) -> None:
        """As `WorkerRunner.pause`."""
        self._tell(key, {"op": "suspend" if is_suspended else "resume"})

    def _tell(self, key: WorkerKey, order: dict[str, object]) -> None:
        shim_control.tell(self._directory(key), key, order)

    def contacted(self, at_s: float) -> None:
        """As `WorkerRunner.contacted`; the next look at the shims passes it on."""
        self._contact_at_s = at_s

    async def statuses(self, started: Collection[WorkerKey] = ()) -> tuple[WorkerStatus, ...]:
        """As `WorkerRunner.statuses`; each live shim gets the last contact, once."""
        if self._held_back:
            await asyncio.to_thread(self._held_back.write)
        seen: list[tuple[WorkerStatus, Path]] = []
        at = self._directories() | {key: self._directory(key) for key in started}
        lost = [key for key in started if not has_file(at[key])]
        silent = await self._silent(lost, at) if lost else set[WorkerKey]()
        for key, directory in sorted(at.items()):
            status = self._status(key, directory)
            if status is None and key in started:
                if key in silent:
                    status = self._lost.end(key, directory, self._uid(directory))
                else:  # it went since this look began; the next one asks its shim
                    status = self._lost.as_before(key)
            if status is not None:
                await cut_lost(status, directory, max_bytes=self._log_max_bytes)
                seen.append((status, directory))
        if not any(self._failures.concerns(status) for status, _ in seen):
            return tuple(status for status, _ in seen)  # no task for each worker that is well
        return tuple(await asyncio.gather(*(self._failures.added(*each) for each in seen)))

    async def _silent(self, lost: list[WorkerKey], at: dict[WorkerKey, Path]) -> set[WorkerKey]:
        """Those of these workers whose shim does not write its status again."""
        asked = (self._lost.ask(key, at[key], self._uid(at[key])) for key in lost)
        said = await asyncio.gather(*asked)
        return {key for key, is_said in zip(lost, said, strict=True) if not is_said}

    def has_shim(self, key: WorkerKey) -> bool:
        """As `WorkerRunner.has_shim`: a shim has its lock before all else, and until it is gone."""
        path = f"{self._directory(key)}/{shim_files.LOCK_FILE}"
        return key not in self._held_back and shim_files.is_locked(path)

    async def leaving(self, keys: Collection[WorkerKey]) -> frozenset[WorkerKey]:
        """As `WorkerRunner.leaving`."""
        return frozenset([key for key in keys if await self._is_leaving(key)])

    async def _is_leaving(self, key: WorkerKey) -> bool:
        directory = self._directory(key)
        of_it = directory, self._uid(directory)
        if key in self._held_back:
            return False  # its lock is this agent's
        if self._hung.is_overdue(key, now_s=self._clock.now_s()):
            return await asyncio.to_thread(self._lost.end_begun, key, *of_it)
        # Its shim may be starting; and its job may have removed the sign of one.
        return self.has_shim(key) or await asyncio.to_thread(has_begun, *of_it)

    def _status(self, key: WorkerKey, directory: Path) -> WorkerStatus | None:
        try:
            record = read_record(directory)
            if record is None:
                return None  # nothing has run yet, and `start` goes on from here; or it is lost
            now_s = self._clock.now_s()
            if record.phase == WorkerPhase.EXITED:
                self._hung.forget(key)
            else:
                self._hung.end_if_hung(key, directory, record, now_s=now_s)
                if not is_shim_alive(directory, record, self._boot_id):
                    record = bury(directory, record, boot_id=self._boot_id, now_s=now_s)
        except (msgspec.DecodeError, OSError) as error:
            if lacks_means(error):
                raise
            unread = self._lost.unread(key, directory) if is_passing(error) else None
            if unread is not None:
                return unread
            text = f"{SHIM_LOST}: its status cannot be read: {str(error)[:MAX_TEXT_CHARS]}"
            # Its shim, which computes nothing, may take until the next look.
            left, _ = self._lost.end_left(key, directory, self._uid(directory))
            phase = WorkerPhase.STOPPING if left else WorkerPhase.EXITED
            lost = Fault.SHIM_LOST
            return WorkerStatus(key=key, phase=phase, pid=0, error=text, fault=lost)
        if record.phase != WorkerPhase.EXITED:
            self._tell_contact(key)
        return self._lost.found(self._as_status(key, record), directory, self._uid(directory))

    def _tell_contact(self, key: WorkerKey) -> None:
        at_s = self._contact_at_s
        if at_s is None or self._told_contact_s.get(key) == at_s:
            return
        with contextlib.suppress(Unavailable, OSError):  # the next look sends it
            self._tell(key, {"op": "ping", "contact_at_s": at_s})
            self._told_contact_s[key] = at_s

    def _as_status(self, key: WorkerKey, record: WorkerRecord) -> WorkerStatus:
        ended_s = record.ended_boot_s
        until_s = self._clock.now_s() if ended_s is None else ended_s
        is_now = ended_s is None or record.boot_id == self._boot_id
        saved_s = record.checkpoint_boot_s
        return WorkerStatus(
            key=key,
            phase=record.phase,
            pid=record.pid,
            shim_pid=record.shim_pid if is_now and ended_s is None else 0,
            exit_code=record.exit_code,
            error=record.error,
            stop_reason=_REASONS.get(record.stop_reason or ""),
            progress=record.progress,
            checkpoint=record.checkpoint,
            running_s=max(0.0, until_s - record.started_boot_s),
            ended_at_s=ended_s if is_now or ended_s is None else 0.0,
            saved_at_s=saved_s if is_now or saved_s is None else 0.0,
            stop_stage=record.stop_stage,
            stop_stages_s=record.stop_stages_s,
            save_over_at_s=record.save_over_at_s if is_now else None,
            detail=record.detail,
            garbage_count=record.garbage_count,
            fault=record.fault,
        )

    async def forget(self, key: WorkerKey) -> None:
        """As `WorkerRunner.forget`."""
        directory = self._directory(key)
        status = self._status(key, directory)
        if status is not None and status.phase != WorkerPhase.EXITED:
            raise Unavailable(f"{key}: cannot be forgotten, it is {status.phase}")
        await asyncio.to_thread(self._remove, key, directory)
        self._told_contact_s.pop(key, None)
        self._failures.forget(key)
        self._lost.forget(key)

    def _remove(self, key: WorkerKey, directory: Path) -> None:
        self._held_back.forget(key)
        if is_shim_silent(directory):
            raise Unavailable(f"{key}: cannot be forgotten, its shim lives")
        if self._kept_logs is not None:
            self._kept_logs.keep(key, directory)
        remove_directory(directory)

    async def log_tail(self, key: WorkerKey, max_bytes: int) -> bytes:
        """As `WorkerRunner.log_tail`; reaches back into the part that was moved aside."""
        return await asyncio.to_thread(self._log_tail, key, max_bytes)

    def _log_tail(self, key: WorkerKey, max_bytes: int) -> bytes:
        directory = self._directory(key)
        is_here = directory.is_dir()
        data = tail(directory, max_bytes)
        kept = self._kept_logs.tail(key, max_bytes) if self._kept_logs and not data else None
        if kept is not None:
            return kept
        if not is_here:
            raise Unavailable("it never ran here, or its log is kept no longer (kept_logs_count)")
        return data

    async def adopt(self) -> tuple[WorkerKey, ...]:
        """As `WorkerRunner.adopt`."""
        statuses = await self.statuses()
        keys = tuple(status.key for status in statuses if status.phase != WorkerPhase.EXITED)
        for key in keys:
            directory = self._directory(key)
            self._lost.adopt(key, directory, self._uid(directory))
        return keys

    async def check_reserve(self, order: WorkerOrder) -> Refusal | None:
        """As `WorkerRunner.check_reserve`; asks as the job's user, in a process of its own."""
        try:
            self._check_not_root()
        except ConfigError as error:  # of its settings: every job would be refused here
            return Refusal(str(error))
        try:
            directory_name(order.key)
        except ConfigError as error:
            return Refusal(str(error), Fault.JOB, "key")
        question = {
            "workdir": order.spec.workdir,
            "checkpoint_path": checkpoint_path(order),
            "command": worker_argv(order, endpoint="")[0],
            "search_path": search_path(order),
        }
        return await self._refuse(question, account=self._account, clock=self._clock)

    def _uid(self, directory: Path) -> int:
        """The account of a worker's processes, even where its directory is gone."""
        try:
            return directory.stat().st_uid
        except OSError:
            return os.geteuid() if self._account is None else self._account.uid

    def _directory(self, key: WorkerKey) -> Path:
        named, directory = self._named.get(str(key), (None, None))
        if directory is not None and named == key:
            return directory
        return self._run_dir / directory_name(key)

    def _directories(self) -> dict[WorkerKey, Path]:
        try:
            with os.scandir(self._run_dir) as entries:
                names = sorted(entry.name for entry in entries)
        except OSError as error:  # gone, closed, or another file is there: each is looked for
            if lacks_means(error):
                raise
            return {}
        # A name stands for one key and one path for ever: only new names are taken apart.
        known = self._named
        self._named = {name: known.get(name) or self._taken_apart(name) for name in names}
        return {key: directory for key, directory in self._named.values() if key is not None}

    def _taken_apart(self, name: str) -> tuple[WorkerKey | None, Path]:
        directory = self._run_dir / name
        return key_of(directory), directory


def make_runner(settings: AgentSettings, *, clock: Clock) -> ShimRunner:
    """The runner that an agent's settings ask for, in `workers` and `logs` of its state directory.

    With systemd it uses the system's manager, whatever account the agent has:
    systemd/50-aryl-agent.rules.

    Raises:
        ConfigError: `job_user` is invalid on this machine, or `failure_rules` is no file of rules.
    """
    match settings.worker_starter:
        case Starter.SYSTEMD:
            starter: ShimStarter = SystemdStarter(clock)
        case Starter.DETACHED:
            starter = DetachedStarter(clock)
    state_dir = Path(settings.state_dir).absolute()  # shims live in a directory of their own
    return ShimRunner(
        state_dir / WORKERS_DIR,
        clock=clock,
        starter=starter,
        kept_logs=KeptLogs(
            state_dir / "logs",
            clock=clock,
            max_count=settings.kept_logs_count,
            max_bytes=settings.kept_logs_bytes,
        ),
        account=job_account(settings.job_user, uid=os.geteuid()),
        is_root_allowed=settings.is_root_allowed,
        failure_rules=read_rules(settings.failure_rules),
    )
