"""A server that is stopped, and who is on its GPUs meanwhile: what is left of it, what outlives it
and what is nobody's, told from each other as an agent tells them."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from agent.core.gpu_handover import is_beside
from agent.core.node_lifecycle import Life
from agent.core.state import Action, Facts, HookKind, Memory, RunHook
from agent.settings import ServerSettings
from agent.telemetry.gpu_attribution import STREAM_RATIO, Look, Strangers
from common.messages import GpuProcess
from common.model import GpuUuid, LeaseId, NodeRole
from tests.harness.node.life import SERVER, LifeHarness, lease, page, two_gpus

R, H = NodeRole, HookKind
GPU = GpuUuid("GPU-0")
AFTER_S = 1.0
"""`stranger_after_s` here."""
FREE_S = 20.0
"""`device_free_timeout_s` here."""
ENGINE, CHILD, MATE, STRANGER = 20, 21, 22, 4711
"""The server's own processes; one that counts as the server's and that no stop of it ends, such as
another server of its unit; and one of nobody's."""


class Kin:
    """A machine on which nothing is a worker's. is_known: whether it can tell the server's."""

    def __init__(self, *, is_known: bool) -> None:
        self.is_known = is_known

    def strangers(self, pids: set[int], owners: Sequence[int]) -> set[int]:
        """As the machine's."""
        return set(pids)

    def beside_server(self, pids: set[int], server: ServerSettings) -> set[int] | None:
        """As the machine's."""
        if not self.is_known or not pids & {ENGINE, CHILD}:
            return None
        return pids - {ENGINE, CHILD, MATE}


class Harness(LifeHarness):
    """A node that serves, with its agent's own eye for strangers.

    Args:
        beside: on the last GPU beside the server from the beginning.
        ends_s: the server's processes leave so long after its stop command.
        stop_error: what that command says; then nothing ends.
    """

    now_s: float

    def __init__(
        self, *beside: int, ends_s: float = 0.0, stop_error: str = "", is_known: bool = True
    ) -> None:
        super().__init__(device_free_timeout_s=FREE_S)
        self.kin = Kin(is_known=is_known)
        self.eye = Strangers(self.kin, SERVER, after_s=AFTER_S, free_memory_ratio=0.05)
        self.on: list[set[int]] = [{ENGINE}, {ENGINE, CHILD, *beside}]
        self.ends_s, self.stop_error = ends_s, stop_error
        self.stopped_at_s: float | None = None
        self.started_beside: set[int] | None = None
        """Who was on the GPUs when the server was started."""
        self.is_healthy, self.page = True, page()
        self.steps(6)
        assert self.role() == R.SERVING
        self.hooks.clear()

    def step(self, after_s: float = 1.0) -> list[Action]:
        """Time passes, the agent looks, and commands are answered."""
        self.now_s += after_s
        if self.stopped_at_s is not None and self.now_s >= self.stopped_at_s + self.ends_s:
            self._leave()
        gpus = tuple(
            msgspec.structs.replace(
                gpu, processes=tuple(GpuProcess(pid=pid) for pid in sorted(self.on[gpu.index]))
            )
            for gpu in two_gpus({})
        )
        look = Look(at_s=self.now_s, gpus=gpus, owners=(), is_healthy=self.is_healthy)
        self.eye.saw(look, self.memory)
        facts = Facts(
            now_s=self.now_s, gpus=gpus, sampled_at_s=self.now_s, inference=self.page,
            is_healthy=self.is_healthy,
            trespassers=self.eye.found, suspects=self.eye.suspects, others=self.eye.others,
        )  # fmt: skip
        actions = self.life.step(facts)
        for action in actions:
            if isinstance(action, RunHook):
                self.hooks.append(action.kind)
                self.answer(action.kind, self.stop_error if action.kind == H.STOP else "")
        return actions

    def answer(self, kind: HookKind, error: str = "") -> None:
        """A stopped server leaves in its time; a started one has the GPUs at once."""
        super().answer(kind, error)
        if kind == H.STOP and not error:
            self.stopped_at_s = self.now_s
            if not self.ends_s:
                self._leave()
        elif kind == H.START:
            self.started_beside = self.on[0] | self.on[1]
            self.stopped_at_s = None
            self.on[0].add(ENGINE)
            self.on[1] |= {ENGINE, CHILD}

    def _leave(self) -> None:
        for pids in self.on:
            pids -= {ENGINE, CHILD}

    def restart(self, boot_id: str = "boot-1") -> None:
        """The agent is killed and starts from what is on disk."""
        saved = msgspec.msgpack.encode(self.memory)
        self.memory = msgspec.msgpack.decode(saved, type=Memory)
        self.life = Life(self.settings, self.memory, boot_id=boot_id, now_s=self.now_s)
        self.eye = Strangers(self.kin, SERVER, after_s=AFTER_S, free_memory_ratio=0.05)

    def told(self) -> set[int]:
        """Processes that it reports as strangers."""
        return {found.pid for found in self.life.trespasses}

    def until_stop(self, name: str = "l1-1") -> None:
        """It is lent, as far as its stop command."""
        self.hooks.clear()
        self.want(R.ON_LOAN, lease=lease(name))
        while H.STOP not in self.hooks:
            self.go(1, name)

    def go(self, count: int, name: str = "l1-1") -> None:
        """Steps of a second; the coordinator prolongs the lease."""
        for _ in range(count):
            self.life.renewed(LeaseId(name), self.now_s + 1000.0)
            self.step()

    def why(self) -> str:
        """Why it turned back; empty where it did not."""
        turned = self.memory.turned_back
        return "" if turned is None else turned.reason


def test_no_server_is_started_beside_its_old_one_because_of_a_stranger() -> None:
    """A stranger sends the node home at once; what is left of the stopped server is waited for all
    the same, and is no stranger."""
    harness = Harness(ends_s=8.0)
    harness.until_stop()
    harness.on[1].add(STRANGER)
    harness.go(7)
    assert (harness.role(), harness.memory.left_behind) == (R.VACATING, [STRANGER])
    harness.go(10)
    assert harness.started_beside == {STRANGER}
    assert (harness.role(), harness.told()) == (R.SERVING, {STRANGER})


def test_an_old_server_that_does_not_end_is_given_its_time_beside_a_stranger_too() -> None:
    """Then it is started beside both: that it had its time is no matter of who else is there."""
    harness = Harness(ends_s=1000.0)
    harness.until_stop()
    harness.on[1].add(STRANGER)
    harness.go(int(FREE_S))
    assert harness.role() == R.VACATING
    assert harness.memory.left_behind == [STRANGER]
    harness.go(8)
    assert harness.role() == R.SERVING
    assert harness.memory.left_behind == [ENGINE, CHILD, STRANGER]


def test_a_turn_back_names_the_stranger_and_not_what_is_left_of_the_server() -> None:
    """Whoever looks for the one that is to blame must not find the other."""
    harness = Harness(ends_s=8.0)
    harness.until_stop()
    harness.on[1].add(STRANGER)
    harness.go(3)
    assert harness.why() == f"GPU GPU-1 is used by process {STRANGER}, which is not the server's"


def test_what_looks_at_the_gpus_for_a_moment_ends_no_loan() -> None:
    """A diagnostic that is seen at the very time of a stop, at each loan with another pid: its end
    is waited for, and the server is stopped once, and started when the node comes home."""
    harness = Harness()
    for loan in range(3):
        harness.hooks.clear()
        harness.want(R.ON_LOAN, lease=lease(f"l1-{loan}"))
        while H.STOP not in harness.hooks:
            harness.go(1, f"l1-{loan}")
        harness.on[1].add(100 + loan)
        harness.go(1, f"l1-{loan}")
        assert harness.role() == R.DRAINING, "nobody else's GPU is lent"
        harness.on[1].discard(100 + loan)
        harness.go(2, f"l1-{loan}")
        assert (harness.role(), harness.hooks, harness.why()) == (
            R.ON_LOAN,
            [H.UNROUTE, H.STOP],
            "",
        )
        harness.want(R.SERVING)
        harness.go(5)
        assert harness.role() == R.SERVING
        assert harness.hooks == [H.UNROUTE, H.STOP, H.START, H.ROUTE]


def test_no_server_is_stopped_beside_somebody_who_may_stay() -> None:
    """Its stop waits until he has gone, or is a stranger: then the drain turns back."""
    harness = Harness()
    harness.want(R.ON_LOAN, lease=lease())
    harness.go(2)
    for pid in range(100, 104):
        harness.on[1] = {ENGINE, CHILD, pid}
        harness.go(1)
        assert (harness.role(), harness.hooks) == (R.DRAINING, [H.UNROUTE])
        assert f"process {pid} stays" in harness.life.detail
    harness.go(2)
    assert (harness.role(), harness.hooks) == (R.SERVING, [H.UNROUTE, H.ROUTE])
    assert "process 103" in harness.why()


def test_a_crash_loop_beside_a_server_ends_the_loan_before_the_stop() -> None:
    """None of its processes stays, and the drain waits for none of them for ever."""
    harness = Harness()
    harness.want(R.ON_LOAN, lease=lease())
    began_at_s, pid = harness.now_s, 100
    while harness.memory.turned_back is None or harness.role() != R.SERVING:
        assert harness.now_s < began_at_s + 3 * STREAM_RATIO * AFTER_S
        harness.on[1].discard(pid)
        pid += 1
        harness.on[1].add(pid)
        harness.go(1)
    assert harness.hooks == [H.UNROUTE, H.ROUTE]
    assert "is used by process" in harness.why()
    assert harness.told(), "and it is not lent again meanwhile"


@pytest.mark.parametrize("is_known", [True, False])
def test_a_server_that_could_not_be_stopped_is_no_stranger(is_known: bool) -> None:
    """Its stop command failed until the time was over. Once that is mended its node can be lent,
    whether it missed a health check meanwhile or not, and whoever can tell the server's."""
    harness = Harness(stop_error="Access denied", is_known=is_known)
    harness.until_stop()
    harness.go(40)
    assert (harness.role(), harness.why()) == (R.SERVING, "stop command: Access denied")
    assert (harness.memory.left_behind, harness.told()) == ([], set())
    harness.is_healthy = False
    harness.step()
    assert harness.told() == set()
    harness.is_healthy = True
    harness.step()
    harness.stop_error = ""
    harness.until_stop("l1-2")
    harness.go(3, "l1-2")
    assert harness.role() == R.ON_LOAN


@pytest.mark.parametrize("ended_by", ["the time", "an order"])
def test_a_server_that_could_not_be_stopped_and_hangs_is_no_stranger(ended_by: str) -> None:
    """It answers nobody until the way home is out of time and it is started: its processes are as
    before, and its own."""
    harness = Harness(stop_error="Access denied")
    harness.until_stop()
    harness.is_healthy, harness.page = False, None
    if ended_by == "an order":
        harness.want(R.SERVING)
    harness.go(60)
    assert (harness.role(), harness.started_beside) == (R.SERVING, {ENGINE, CHILD})
    assert (harness.memory.left_behind, harness.told()) == ([], set())


@pytest.mark.parametrize("stranger", [(), (STRANGER,)])
def test_what_outlives_the_server_is_learnt_once(stranger: tuple[int, ...]) -> None:
    """Whoever it belongs to: its node is not lent again as long as it is there, also if its agent
    restarts, and with a stranger beside it that had sent the node home before."""
    harness = Harness(MATE)
    harness.until_stop()
    harness.on[1] |= set(stranger)
    harness.go(2 * int(FREE_S))
    assert (harness.role(), harness.told()) == (R.SERVING, {MATE, *stranger})
    said = f"trespass: process {MATE} on GPU-1, seen there while the server was stopped"
    assert said in harness.life.detail
    harness.on[1].discard(STRANGER)
    harness.restart()
    for _ in range(2):
        harness.step()
        assert harness.told() == {MATE}
    harness.on[1].discard(MATE)
    harness.step()
    assert harness.told() == set()
    harness.until_stop("l1-2")
    harness.go(3, "l1-2")
    assert harness.role() == R.ON_LOAN


def test_a_drain_that_turned_back_is_over_for_an_agent_that_restarts_too() -> None:
    """It was killed before the node was routed to again, and the stranger has gone meanwhile: what
    was told of the loan stays true."""
    harness = Harness()
    harness.page = page(running=1)
    harness.want(R.ON_LOAN, lease=lease())
    harness.go(3)
    harness.on[1].add(STRANGER)
    while not harness.why():
        harness.go(1)
    why = harness.why()
    assert harness.role() == R.DRAINING
    harness.restart()
    harness.on[1].discard(STRANGER)
    harness.page = page()
    harness.go(10)
    assert (harness.role(), harness.why()) == (R.SERVING, why)
    assert set(harness.hooks) == {H.UNROUTE, H.ROUTE}


@pytest.mark.parametrize("is_healthy", [True, False])
def test_an_agent_that_restarts_knows_the_strangers_of_before(is_healthy: bool) -> None:
    """At its first look, which it reports: its node would be lent by it. One that came since is
    judged as ever, and a boot ends them all."""
    harness = Harness(STRANGER)
    assert harness.told() == {STRANGER}
    harness.restart()
    harness.is_healthy = is_healthy
    harness.on[0].add(STRANGER + 1)
    harness.step()
    assert harness.told() == {STRANGER}
    harness.is_healthy = True
    harness.steps(2)
    assert harness.told() == {STRANGER, STRANGER + 1}
    harness.restart(boot_id="boot-2")
    assert (harness.memory.strangers, harness.memory.left_behind) == ([], [])


def test_a_sample_of_before_the_stop_does_not_end_the_loan() -> None:
    """It shows who was beside the server, which may have ended with it."""
    harness = Harness()
    harness.until_stop()
    assert harness.stopped_at_s is not None
    seen = Facts(now_s=harness.now_s, sampled_at_s=harness.stopped_at_s, trespassers=((1, GPU),))
    assert not is_beside(seen, since_s=harness.stopped_at_s)
    later = msgspec.structs.replace(seen, sampled_at_s=harness.stopped_at_s + 0.1)
    assert is_beside(later, since_s=harness.stopped_at_s)


def test_units_that_are_not_the_servers_are_told_in_the_reason() -> None:
    """An operator looks there why no stranger is ever seen, or why the node is where it is."""
    harness = Harness()
    harness.life.step(Facts(now_s=harness.now_s, unknown_server="server.units: no process"))
    assert "server.units: no process" in harness.life.detail
    harness.step()
    assert "server.units" not in harness.life.detail
