"""Carries out a schedule of faults on a live cell, heals each in time, and notes what it did.

Must not know promises, nor judge. A target that is already hurt is left alone until it is well: a
node has at most one fault of its own at a time, and a node that may be lent not another one before
it could have come home. NATS, both coordinators and any nodes may well be hurt together.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import signal
import struct
from collections import Counter
from collections.abc import Awaitable, Callable, Sequence

import msgspec

from common.api import Cancel, Done, ListLoans, ListNodes, Loans, Nodes, Operate
from common.bus import NatsBus
from common.clock import SystemClock
from common.errors import ArylError, ConfigError, Unavailable
from common.model import NodeRole, Pool
from coordinator.client import Client
from coordinator.demo.cell import COORDINATOR
from coordinator.demo.plan import SERVICE
from coordinator.service.leadership.jetstream_key import NatsKey
from coordinator.service.leadership.lease import LeaseValue
from tests.live.faults import FaultKind, Planned
from tests.live.hurt_cell import COORDINATORS, STANDBY, Held, LiveCell, has_words
from tests.live.proxy import Link
from tests.live.recording import Fault
from tests.live.workload import Workload

log = logging.getLogger(__name__)

K = FaultKind
REST_S = 4.0
"""A part that was hurt is left alone for so long after it was healed."""
ASK_S = 2.0
UNDO_S = 0.5
"""Between two tries to take back an order of a person."""
FILL_BYTES = 4096
TORN = struct.pack("<II", 400, 12345) + bytes(range(60))
"""The begin of a ledger's record whose write was cut off."""
TORN_STATUS = b'{"phase":"exited","exit_co'

Heal = Callable[[], Awaitable[None]]


class NotNow(Exception):  # noqa: N818 - no error: there is no such target now
    """There is nothing to hurt in this way now."""


class Hit(msgspec.Struct, kw_only=True):
    """A fault that was just injected, and how it is undone."""

    target: str
    parts: tuple[str, ...] = ()
    """What is left alone until it is well again."""
    heal: Heal | None = None
    job: str = ""
    attempt: int = 0


class Nemesis:
    """Hurts one cell.

    Args:
        bus: its own way to NATS, past the proxies.
        rest_s: how long a node that may be lent is left alone after a fault of its own.
        set_load: asks for more or less load.
    """

    def __init__(
        self,
        cell: LiveCell,
        workload: Workload,
        *,
        bus: NatsBus,
        client: Client,
        rest_s: float,
        set_load: Callable[[bool], None],
    ) -> None:
        self.faults: list[Fault] = []
        self.skipped: Counter[str] = Counter()
        self.recalled_at_s: list[float] = []
        """When a person's call of all nodes was acknowledged."""
        self._cell = cell
        self._workload = workload
        self._client = client
        self._key = NatsKey(bus, cell="local", timeout_s=ASK_S)
        self._rest_s = rest_s
        self._set_load = set_load
        self._clock = SystemClock()
        self._hurt: set[str] = set()
        self._healing: set[asyncio.Task[None]] = set()
        self._number = 0
        self._leader = COORDINATOR
        self._hits: dict[FaultKind, Callable[[Planned], Awaitable[Hit]]] = {
            K.AGENT_KILL: self._agent_kill,
            K.AGENT_STOP: self._agent_stop,
            K.AGENT_AWAY: self._agent_away,
            K.AGENT_CUT: self._agent_link,
            K.AGENT_BLACKHOLE: self._agent_link,
            K.AGENT_SLOW: self._agent_link,
            K.LEDGER_TORN: self._ledger_torn,
            K.DISK_FULL: self._disk_full,
            K.NVML_HANG: self._nvml_hang,
            K.NVML_HANG_AT_START: self._nvml_hang,
            K.READER_KILL: self._reader,
            K.READER_STOP: self._reader,
            K.SHIM_KILL: self._worker,
            K.SHIM_STOP: self._worker,
            K.STATUS_TORN: self._worker,
            K.WORKER_KILL: self._worker,
            K.WORKER_STOP: self._worker,
            K.SERVER_KILL: self._server_kill,
            K.LEADER_KILL: self._coordinator_signal,
            K.LEADER_AWAY: self._leader_away,
            K.LEADER_STOP: self._coordinator_signal,
            K.LEADER_CUT: self._leader_link,
            K.LEADER_BLACKHOLE: self._leader_link,
            K.LEADER_SLOW: self._leader_link,
            K.STANDBY_KILL: self._coordinator_signal,
            K.STANDBY_STOP: self._coordinator_signal,
            K.HANDOVER: self._coordinator_signal,
            K.NATS_KILL: self._nats_kill,
            K.NATS_AWAY: self._nats_away,
            K.NATS_STOP: self._nats_stop,
            K.JOURNAL_FLIP: self._journal_flip,
            K.DRAIN: self._drain,
            K.CORDON: self._cordon,
            K.RECALL: self._recall,
            K.REVOKE: self._revoke,
            K.CANCEL: self._cancel,
            K.LOAD_HIGH: self._load_high,
        }

    async def run(self, schedule: Sequence[Planned]) -> None:
        """Carry out a schedule; returns when the last fault is healed."""
        begin_s = self._clock.now_s()
        try:
            for planned in schedule:
                await self._clock.sleep(max(0.0, begin_s + planned.at_s - self._clock.now_s()))
                await self._carry_out(planned)
            while self._healing:
                await asyncio.gather(*self._healing)
        finally:
            left = tuple(self._healing)
            for task in left:
                task.cancel()
            await asyncio.gather(*left, return_exceptions=True)

    async def _carry_out(self, planned: Planned) -> None:
        at_s = self._clock.now_s()
        try:
            hit = await self._hits[planned.kind](planned)
        except (NotNow, ProcessLookupError, ArylError, OSError) as error:
            log.info("no %s: %s", planned.kind, str(error) or type(error).__name__)
            self.skipped[planned.kind] += 1
            return
        self._number += 1
        fault = Fault(
            number=self._number,
            kind=planned.kind,
            target=hit.target,
            at_s=at_s,
            # Known only once it is healed; until then it is on.
            healed_at_s=None if hit.heal is None else float("inf"),
            job=hit.job,
            attempt=hit.attempt,
        )
        self.faults.append(fault)
        log.info("%d %s %s for %.1f s", fault.number, fault.kind, fault.target, planned.for_s)
        self._hurt |= set(hit.parts)
        if hit.heal is None:
            self._rest(hit)
            return
        task = asyncio.create_task(self._heal(len(self.faults) - 1, planned, hit, hit.heal))
        self._healing.add(task)
        task.add_done_callback(self._healing.discard)

    async def _heal(self, place: int, planned: Planned, hit: Hit, heal: Heal) -> None:
        await self._clock.sleep(planned.for_s)
        await heal()
        healed_at_s = self._clock.now_s()
        self.faults[place] = msgspec.structs.replace(self.faults[place], healed_at_s=healed_at_s)
        self._rest(hit)

    def _rest(self, hit: Hit) -> None:
        """Leave what was hurt alone for a while."""
        is_lent = any(part.startswith("infer-") for part in hit.parts)
        rest_s = self._rest_s if is_lent else REST_S
        loop = asyncio.get_running_loop()
        loop.call_later(rest_s, self._hurt.difference_update, hit.parts)

    # --- choosing

    def _choose(self, names: Sequence[str], planned: Planned) -> str:
        """One of those that are well."""
        well = [name for name in names if name not in self._hurt]
        if not well:
            raise NotNow("all of them are hurt")
        return well[planned.pick % len(well)]

    def _node(self, planned: Planned) -> str:
        return self._choose([node.name for node in self._cell.nodes], planned)

    async def _leader_unit(self) -> str:
        """The unit that leads now, by the leader's key; while NATS is hurt, the last known one."""
        try:
            entry = await self._key.get()
        except ArylError:
            if "nats" in self._hurt:
                return self._leader
            raise
        if entry is None or not entry.value:
            raise NotNow("no coordinator leads")
        value = msgspec.msgpack.decode(entry.value, type=LeaseValue)
        for unit in COORDINATORS:
            pid = self._pid_of(unit)
            if pid is not None and value.process is not None and value.process.pid == pid:
                self._leader = unit
                return unit
        raise NotNow("the leader has just ended")

    def _pid_of(self, unit: str) -> int | None:
        try:
            return self._cell.units.pid(unit)
        except KeyError:  # it is away
            return None

    def _held(self, unit: str) -> Held:
        pid = self._pid_of(unit)
        if pid is None:
            raise NotNow(f"{unit} is not there")
        return Held(pid)

    @staticmethod
    def _strike(held: Held, number: signal.Signals) -> Heal | None:
        """Send a signal; how it is taken back, if it is a stop."""
        held.send(number)
        if number != signal.SIGSTOP:
            held.close()
            return None

        async def go_on() -> None:
            held.send(signal.SIGCONT)
            held.close()

        return go_on

    # --- agents

    async def _agent_kill(self, planned: Planned) -> Hit:
        node = self._node(planned)
        self._strike(self._held(self._cell.agent_unit(node)), signal.SIGKILL)
        return Hit(target=node, parts=(node,))

    async def _agent_stop(self, planned: Planned) -> Hit:
        node = self._node(planned)
        heal = self._strike(self._held(self._cell.agent_unit(node)), signal.SIGSTOP)
        return Hit(target=node, parts=(node,), heal=heal)

    async def _agent_away(self, planned: Planned) -> Hit:
        node = self._node(planned)
        return Hit(target=node, parts=(node,), heal=await self._away(self._cell.agent_unit(node)))

    async def _away(self, unit: str) -> Heal:
        if self._pid_of(unit) is None:
            raise NotNow(f"{unit} is not there")
        await self._cell.units.kill(unit)

        async def come_back() -> None:
            self._cell.units.start(self._cell.unit_by_name[unit])

        return come_back

    async def _agent_link(self, planned: Planned) -> Hit:
        node = self._node(planned)
        return Hit(target=node, parts=(node,), heal=self._link(node, planned.kind))

    def _link(self, name: str, kind: FaultKind) -> Heal:
        self._cell.link(name, Link(kind.value.partition("_")[2]))

        async def mend() -> None:
            self._cell.link(name, Link.WHOLE)

        return mend

    async def _ledger_torn(self, planned: Planned) -> Hit:
        node = self._node(planned)
        come_back = await self._away(self._cell.agent_unit(node))
        try:
            with (self._cell.state_dir(node) / "ledger").open("ab") as file:
                file.write(TORN)
        finally:
            await come_back()
        return Hit(target=node, parts=(node,))

    async def _disk_full(self, planned: Planned) -> Hit:
        if not self._cell.has_disks:
            raise NotNow("this account may not mount a disk")
        node = self._node(planned)
        path = self._cell.state_dir(node) / "fill"
        await asyncio.to_thread(fill, str(path))

        async def make_room() -> None:
            path.unlink()

        return Hit(target=node, parts=(node,), heal=make_room)

    # --- GPUs

    async def _nvml_hang(self, planned: Planned) -> Hit:
        node = self._node(planned)
        self._cell.write_fleet(node, is_hanging=True)
        self._end_reader(node)
        if planned.kind == K.NVML_HANG_AT_START:
            self._strike(self._held(self._cell.agent_unit(node)), signal.SIGKILL)

        async def answer() -> None:
            self._cell.write_fleet(node, is_hanging=False)
            self._end_reader(node)

        return Hit(target=node, parts=(node,), heal=answer)

    def _end_reader(self, node: str) -> None:
        """The next one reads the GPUs as they are now."""
        pid = self._cell.reader_pid(node)
        if pid is not None:
            with contextlib.suppress(ProcessLookupError):
                self._strike(Held(pid), signal.SIGKILL)

    async def _reader(self, planned: Planned) -> Hit:
        node = self._node(planned)
        pid = self._cell.reader_pid(node)
        if pid is None:
            raise NotNow("nothing reads the GPUs")
        number = signal.SIGKILL if planned.kind == K.READER_KILL else signal.SIGSTOP
        return Hit(target=node, parts=(node,), heal=self._strike(Held(pid), number))

    # --- work and servers

    async def _worker(self, planned: Planned) -> Hit:
        found = [each for each in self._cell.workers() if each.node not in self._hurt]
        found = [each for each in found if each.job not in self._hurt]
        if not found:
            raise NotNow("no worker runs")
        chosen = found[planned.pick % len(found)]
        is_shim = planned.kind not in (K.WORKER_KILL, K.WORKER_STOP)
        if is_shim and not has_words(chosen.shim_pid, b"agent/shim/main.py"):
            raise NotNow("its shim is gone")
        is_stop = planned.kind in (K.SHIM_STOP, K.WORKER_STOP)
        number = signal.SIGSTOP if is_stop else signal.SIGKILL
        heal = self._strike(Held(chosen.shim_pid if is_shim else chosen.pid), number)
        if planned.kind == K.STATUS_TORN:
            with contextlib.suppress(OSError):
                (chosen.directory / "status.json.new").write_bytes(TORN_STATUS)
        return Hit(
            target=f"{chosen.job}.{chosen.attempt}.{chosen.index}",
            parts=(chosen.node, chosen.job),
            heal=heal,
            job=chosen.job,
            attempt=chosen.attempt,
        )

    async def _server_kill(self, planned: Planned) -> Hit:
        rows = (await self._client.ask(ListNodes(), Nodes)).rows
        names = [row.node for row in rows if row.role == NodeRole.SERVING]
        node = self._choose(sorted(names), planned)
        pid = self._cell.server_pid(node)
        if pid is None:
            raise NotNow("no server runs")
        self._strike(Held(pid), signal.SIGKILL)
        return Hit(target=node, parts=(node,))

    # --- coordinators and NATS

    async def _coordinator(self, kind: FaultKind) -> str:
        leader = await self._leader_unit()
        other = STANDBY if leader == COORDINATOR else COORDINATOR
        unit = other if kind in (K.STANDBY_KILL, K.STANDBY_STOP) else leader
        if unit in self._hurt:
            raise NotNow(f"{unit} is hurt")
        return unit

    async def _coordinator_signal(self, planned: Planned) -> Hit:
        unit = await self._coordinator(planned.kind)
        number = {
            K.LEADER_STOP: signal.SIGSTOP,
            K.STANDBY_STOP: signal.SIGSTOP,
            K.HANDOVER: signal.SIGTERM,
        }.get(planned.kind, signal.SIGKILL)
        return Hit(target=unit, parts=(unit,), heal=self._strike(self._held(unit), number))

    async def _leader_away(self, planned: Planned) -> Hit:
        unit = await self._coordinator(planned.kind)
        return Hit(target=unit, parts=(unit,), heal=await self._away(unit))

    async def _leader_link(self, planned: Planned) -> Hit:
        unit = await self._coordinator(planned.kind)
        return Hit(target=unit, parts=(unit,), heal=self._link(unit, planned.kind))

    def _server(self, planned: Planned) -> tuple[int, Held]:
        """One of the nats-servers that run; none while another one is hurt."""
        place = planned.pick % len(self._cell.servers)
        pid = self._cell.servers[place].pid
        if pid is None or "nats" in self._hurt:
            raise NotNow("nats-server is hurt")
        return place, Held(pid)

    async def _nats_kill(self, planned: Planned) -> Hit:
        place, held = self._server(planned)
        self._strike(held, signal.SIGKILL)
        return Hit(target=f"nats-{place}", parts=("nats",))

    async def _nats_stop(self, planned: Planned) -> Hit:
        place, held = self._server(planned)
        heal = self._strike(held, signal.SIGSTOP)
        return Hit(target=f"nats-{place}", parts=("nats",), heal=heal)

    async def _nats_away(self, planned: Planned) -> Hit:
        place, held = self._server(planned)
        held.close()
        await self._cell.kill_server(place)

        async def come_back() -> None:
            await self._start_nats(place)

        return Hit(target=f"nats-{place}", parts=("nats",), heal=come_back)

    async def _start_nats(self, place: int) -> None:
        while True:
            try:
                await self._cell.start_server(place)
            except (Unavailable, ConfigError, OSError) as error:
                log.warning("nats-server does not start: %s", error)
                await self._clock.sleep(UNDO_S)
            else:
                return

    async def _journal_flip(self, planned: Planned) -> Hit:
        place, held = self._server(planned)
        held.close()
        await self._cell.kill_server(place)
        store = self._cell.servers[place].directory / "jetstream"
        blocks = sorted(
            (path for path in store.rglob("*.blk") if "JOURNAL" in str(path).upper()),
            key=lambda path: path.stat().st_mtime_ns,
        )
        if blocks:
            await asyncio.to_thread(flip, str(blocks[-1]), planned.pick)
        await self._start_nats(place)
        return Hit(target=f"nats-{place}", parts=("nats",))

    # --- people

    async def _order(self, action: str, target: str) -> None:
        request = Operate(action=action, target=target, reason="nemesis")
        await self._client.ask(request, Done)

    def _taken_back(self, action: str, target: str) -> Heal:
        async def take_back() -> None:
            while True:
                try:
                    await self._order(action, target)
                except ArylError as error:
                    log.info("%s %s: %s", action, target, error)
                    await self._clock.sleep(UNDO_S)
                else:
                    return

        return take_back

    async def _drain(self, planned: Planned) -> Hit:
        names = [node.name for node in self._cell.nodes if node.pool == Pool.TRAINING]
        return await self._closed("drain", self._choose(names, planned))

    async def _cordon(self, planned: Planned) -> Hit:
        return await self._closed("cordon", self._node(planned))

    async def _closed(self, action: str, node: str) -> Hit:
        heal = self._taken_back("uncordon", node)
        try:
            await self._order(action, node)
        except Unavailable as error:  # it may be carried out all the same
            log.info("%s %s is not acknowledged: %s", action, node, error)
        return Hit(target=node, parts=(f"closed {node}",), heal=heal)

    async def _recall(self, planned: Planned) -> Hit:
        if SERVICE in self._hurt:
            raise NotNow("it is recalled")
        heal = self._taken_back("end_recall", SERVICE)
        try:
            await self._order("recall", SERVICE)
        except Unavailable as error:  # it may be carried out all the same
            log.info("recall is not acknowledged: %s", error)
        else:
            self.recalled_at_s.append(self._clock.now_s())
        return Hit(target=SERVICE, parts=(SERVICE,), heal=heal)

    async def _revoke(self, planned: Planned) -> Hit:
        loans = (await self._client.ask(ListLoans(), Loans)).rows
        out = sorted(loan.node for loan in loans if loan.reclaim_ordered_at_s is None)
        if not out:
            raise NotNow("nothing is lent")
        node = out[planned.pick % len(out)]
        await self._order("revoke_loan", node)
        return Hit(target=node)

    async def _cancel(self, planned: Planned) -> Hit:
        live = self._workload.live()
        if not live:
            raise NotNow("no job is live")
        job = live[planned.pick % len(live)]
        self._workload.forgo(job)
        try:
            await self._client.ask(Cancel(job_id=job), Done)
        except ArylError as error:  # it may be carried out all the same
            log.info("cancel %s: %s", job, error)
        return Hit(target=job, job=job)

    async def _load_high(self, planned: Planned) -> Hit:
        if "load" in self._hurt:
            raise NotNow("the load is high")
        self._set_load(True)

        async def fall() -> None:
            self._set_load(False)

        return Hit(target=SERVICE, parts=("load",), heal=fall)


def fill(path: str) -> None:
    """Write a file until its disk is full."""
    fd = os.open(path, os.O_WRONLY | os.O_CREAT, 0o600)
    try:
        with contextlib.suppress(OSError):
            while True:
                os.write(fd, bytes(FILL_BYTES))
    finally:
        os.close(fd)


def flip(path: str, pick: int) -> None:
    """Turn one bit round in the last kilobyte of a file."""
    fd = os.open(path, os.O_RDWR)
    try:
        size = os.fstat(fd).st_size
        place = max(0, size - 1 - pick % 1024)
        byte = os.pread(fd, 1, place)
        if byte:
            os.pwrite(fd, bytes([byte[0] ^ (1 << pick % 8)]), place)
            os.fsync(fd)
    finally:
        os.close(fd)
