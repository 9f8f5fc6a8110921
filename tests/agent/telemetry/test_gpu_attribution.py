"""Who is a stranger on the GPUs of a node, by what the node does at the time."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import pytest

from agent.core.state import first_memory
from agent.settings import ServerSettings
from agent.telemetry.gpu_attribution import STREAM_RATIO, Look, Strangers
from common.messages import GpuProcess, GpuReport
from common.model import GpuUuid, NodeRole
from tests.harness.node.life import SERVER, settings

R = NodeRole
AFTER_S = 1.0
"""Here, where two samples are a second apart."""
OWNER = 100
"""Of a granted worker; every process below 10 descends from it."""
WORKER, SERVERS, CHILD, STRANGER, OTHER = 1, 20, 21, 30, 31


class Kin:
    """A machine that knows whose its processes are; `server` None: not who is the server's."""

    def __init__(self) -> None:
        self.server: set[int] | None = {SERVERS, CHILD}
        self.dead: set[int] = set()

    def strangers(self, pids: set[int], owners: Sequence[int]) -> set[int]:
        """As the machine's: by descent."""
        return {pid for pid in pids if not (OWNER in owners and pid < 10)} - self.dead

    def beside_server(self, pids: set[int], server: ServerSettings) -> set[int] | None:
        """As the machine's: by what is known of the server."""
        assert server.health_url == SERVER.health_url
        return None if self.server is None else pids - self.server - self.dead


class Harness:
    """A node's memory and who is on its one GPU."""

    def __init__(self, role: NodeRole = R.SERVING) -> None:
        self.kin = Kin()
        self.memory = first_memory(settings(), "boot-1")
        self.memory.role = role
        self.eye = Strangers(self.kin, SERVER, after_s=AFTER_S, free_memory_ratio=0.05)
        self.is_healthy = True
        self.at_s = 0.0

    def saw(
        self, *pids: int, role: NodeRole | None = None, same: bool = False, later_s: float = 1.0
    ) -> list[int]:
        """Strangers by a look at these processes, of a new sample unless it is the same."""
        self.memory.role = role or self.memory.role
        self.at_s += 0.0 if same else later_s
        gpu = GpuReport(
            uuid=GpuUuid("GPU-0"), index=0, gpu_type="H100", memory_total_bytes=1,
            processes=tuple(GpuProcess(pid=pid) for pid in pids),
        )  # fmt: skip
        look = Look(at_s=self.at_s, gpus=(gpu,), owners=(OWNER,), is_healthy=self.is_healthy)
        self.eye.saw(look, self.memory)
        assert all(uuid == "GPU-0" for _, uuid in self.eye.found)
        return [pid for pid, _ in self.eye.found]


def test_beside_a_server_it_is_whoever_is_not_the_servers_twice() -> None:
    """One sample may show a server that ends and be judged by the next one; the same sample again
    is no second one. The server's own children are never strangers."""
    harness = Harness()
    assert harness.saw(SERVERS, CHILD, STRANGER) == []
    assert harness.saw(SERVERS, CHILD, STRANGER, same=True) == []
    assert harness.saw(SERVERS, CHILD, STRANGER, OTHER) == [STRANGER]
    assert harness.saw(SERVERS, CHILD, STRANGER, OTHER) == [STRANGER, OTHER]
    assert harness.saw(SERVERS, OTHER) == [OTHER]


def test_while_a_server_restarts_nobody_new_is_a_stranger() -> None:
    """Its old processes and its new ones are on the GPU together; who was one before stays one."""
    harness = Harness()
    for _ in range(2):
        harness.saw(SERVERS, STRANGER)
    harness.is_healthy = False
    for _ in range(3):
        assert harness.saw(SERVERS, CHILD, STRANGER, OTHER) == [STRANGER]
    assert harness.saw(SERVERS, CHILD) == []
    assert harness.saw(SERVERS, CHILD, STRANGER) == [], "it left, and nobody can tell who that is"


def test_where_nobody_can_tell_the_server_nobody_is_accused() -> None:
    """Such as a server of another account without its units in the settings; but who was left
    behind when it had stopped is known."""
    harness = Harness()
    harness.kin.server = None
    harness.memory.left_behind = [OTHER]
    for _ in range(3):
        assert harness.saw(SERVERS, STRANGER, OTHER) == [OTHER]


@pytest.mark.parametrize("role", [R.TRAINING, R.ON_LOAN])
def test_beside_workers_it_is_whoever_is_no_workers(role: NodeRole) -> None:
    """At once, the server's process among them: it has no business there."""
    harness = Harness(role)
    assert harness.saw(WORKER, SERVERS, STRANGER) == [SERVERS, STRANGER]
    harness.kin.dead = {STRANGER}
    assert harness.saw(WORKER, STRANGER) == []


def test_what_is_left_of_a_stopped_server_is_no_stranger() -> None:
    """It may take a while to end; who was beside it, or came since and stays, is one."""
    harness = Harness()
    harness.saw(SERVERS, CHILD)
    harness.memory.is_server_stopped = True
    assert harness.saw(CHILD, OTHER, role=R.DRAINING) == []
    assert harness.saw(CHILD, OTHER) == [OTHER]
    assert harness.eye.others == {CHILD, OTHER}
    assert harness.saw(CHILD, OTHER, role=R.VACATING) == [OTHER]


@pytest.mark.parametrize(
    ("role", "is_stopped"), [(R.SERVING, False), (R.DRAINING, False), (R.DRAINING, True)]
)
def test_who_is_there_for_a_moment_is_no_stranger_to_a_node_that_could_be_lent(
    role: NodeRole, is_stopped: bool
) -> None:
    """However many samples show it; it is told as one that may become one, and does by staying."""
    harness = Harness()
    harness.saw(SERVERS)
    harness.memory.is_server_stopped = is_stopped
    for pid in range(40, 50):  # a diagnostic, with another pid each time
        for _ in range(4):
            assert harness.saw(SERVERS, pid, role=role, later_s=AFTER_S / 4) == []
            assert harness.eye.suspects == {pid}
        assert harness.saw(SERVERS, later_s=AFTER_S / 4) == []
        assert harness.eye.suspects == frozenset()
    for _ in range(4):
        assert harness.saw(SERVERS, STRANGER, later_s=AFTER_S / 4) == []
    assert harness.saw(SERVERS, STRANGER, later_s=AFTER_S / 4) == [STRANGER]
    assert harness.eye.suspects == frozenset()


@pytest.mark.parametrize(
    ("role", "is_stopped"), [(R.SERVING, False), (R.DRAINING, False), (R.DRAINING, True)]
)
def test_processes_that_follow_each_other_on_a_gpu_are_one_stranger_in_the_end(
    role: NodeRole, is_stopped: bool
) -> None:
    """None of them stays, and somebody is always there: a loan would wait for ever to see who."""
    harness = Harness()
    harness.saw(SERVERS)
    harness.memory.is_server_stopped = is_stopped
    looks = int(STREAM_RATIO * 2)
    for pid in range(40, 40 + looks):
        assert harness.saw(SERVERS, pid, role=role, later_s=AFTER_S / 2) == []
        assert harness.eye.suspects == {pid}
    for pid in range(90, 95):
        assert harness.saw(SERVERS, pid, later_s=AFTER_S / 2) == [pid], "the newest, by name"
        assert harness.saw(SERVERS, pid, same=True) == [pid]
    assert harness.saw(SERVERS, 95, 96, later_s=AFTER_S / 2) == [96]
    assert harness.saw(SERVERS, later_s=AFTER_S / 2) == []
    assert harness.saw(SERVERS, 99, later_s=AFTER_S / 2) == [], "its time begins anew"


def test_a_gap_in_the_samples_of_a_process_begins_its_time_anew() -> None:
    """It may be another one of the same pid, and nobody was in the way meanwhile."""
    harness = Harness()
    for _ in range(3):
        assert harness.saw(SERVERS, STRANGER, later_s=AFTER_S / 2) == []
        assert harness.saw(SERVERS, later_s=AFTER_S / 2) == []
    for is_healthy in (True, False, True):
        harness.is_healthy = is_healthy
        assert harness.saw(SERVERS, STRANGER) == [], "nobody could tell in between"


def test_a_way_home_waits_for_nobody_to_stay() -> None:
    """Whoever is seen once, and is not the server's, is one that the server is started beside."""
    harness = Harness()
    harness.saw(SERVERS, CHILD)
    harness.memory.is_server_stopped = True
    assert harness.saw(CHILD, OTHER, role=R.DRAINING) == []
    assert harness.saw(CHILD, OTHER, role=R.VACATING, later_s=0.01) == [OTHER]


def test_of_an_unknown_server_that_was_stopped_all_may_be_its_own() -> None:
    """All are told as others, for whoever waits for them."""
    harness = Harness()
    harness.kin.server = None
    harness.saw(SERVERS, STRANGER)
    harness.memory.is_server_stopped = True
    assert harness.saw(SERVERS, STRANGER, role=R.DRAINING) == []
    assert harness.eye.others == {SERVERS, STRANGER}


def test_a_server_that_was_known_once_is_not_for_ever() -> None:
    """Another one may have taken its place since, whose processes nobody knows."""
    harness = Harness()
    harness.saw(SERVERS)
    harness.kin.server = None
    harness.saw(CHILD, STRANGER)
    harness.memory.is_server_stopped = True
    assert harness.saw(CHILD, STRANGER, role=R.DRAINING) == []


def test_after_a_loan_it_is_whoever_is_no_workers() -> None:
    """The GPUs were free of the server when the loan began, whoever could tell it then."""
    harness = Harness()
    harness.kin.server = None
    harness.saw(SERVERS)
    harness.memory.is_server_stopped = True
    harness.saw(WORKER, role=R.ON_LOAN)
    assert harness.saw(WORKER, STRANGER, role=R.VACATING) == [STRANGER]
    assert harness.eye.others == {STRANGER}
    assert harness.saw(SERVERS, STRANGER, role=R.WARMING) == [STRANGER]
    assert harness.eye.others == frozenset()
    assert harness.saw(SERVERS, STRANGER, role=R.SERVING) == [STRANGER]


def test_a_server_that_was_started_beside_a_stranger_is_told_from_it() -> None:
    """Its new processes are its own."""
    harness = Harness(R.WARMING)
    harness.saw(CHILD)
    assert harness.saw(SERVERS, CHILD, STRANGER, role=R.SERVING) == []
    assert harness.saw(SERVERS, CHILD, STRANGER) == [STRANGER]


@pytest.mark.parametrize("role", [R.TRAINING, R.ON_LOAN, R.VACATING])
def test_where_a_worker_starts_only_those_are_strangers_that_were_before(role: NodeRole) -> None:
    """Until its shim has said which process it is, whoever is new on its GPUs may be it; elsewhere
    on the node it is not."""
    harness = Harness(R.ON_LOAN)
    assert harness.saw(STRANGER) == [STRANGER]
    harness.memory.role = role
    gpus = tuple(
        GpuReport(
            uuid=GpuUuid(f"GPU-{index}"), index=index, gpu_type="H100", memory_total_bytes=1,
            processes=tuple(GpuProcess(pid=pid) for pid in pids),
        )
        for index, pids in enumerate([(STRANGER, OTHER), (SERVERS,)])
    )  # fmt: skip
    look = Look(at_s=9.0, gpus=gpus, owners=(), is_healthy=False, unnamed=frozenset({gpus[0].uuid}))
    harness.eye.saw(look, harness.memory)
    assert harness.eye.found == ((STRANGER, "GPU-0"), (SERVERS, "GPU-1"))
    harness.eye.saw(msgspec.structs.replace(look, at_s=10.0, unnamed=frozenset()), harness.memory)
    assert (OTHER, "GPU-0") in harness.eye.found


def test_whoever_may_be_a_worker_that_starts_is_a_stranger_on_the_other_gpus() -> None:
    """Its worker was not given those; one process may be on several."""
    harness = Harness(R.TRAINING)
    gpus = tuple(
        GpuReport(
            uuid=GpuUuid(f"GPU-{index}"), index=index, gpu_type="H100", memory_total_bytes=1,
            processes=(GpuProcess(pid=OTHER),),
        )
        for index in range(2)
    )  # fmt: skip
    look = Look(at_s=9.0, gpus=gpus, owners=(), is_healthy=False, unnamed=frozenset({gpus[0].uuid}))
    harness.eye.saw(look, harness.memory)
    assert harness.eye.found == ((OTHER, "GPU-1"),)


def test_a_look_that_sees_no_gpu_shows_nobody_gone() -> None:
    """NVML did not answer: whoever was there may be there."""
    harness = Harness()
    for _ in range(2):
        harness.saw(SERVERS, STRANGER)
    look = Look(at_s=9.0, gpus=None, owners=(), is_healthy=True)
    harness.eye.saw(look, harness.memory)
    assert [pid for pid, _ in harness.eye.found] == [STRANGER]


def test_a_node_without_a_server_accuses_nobody_between_its_roles() -> None:
    """Of the training pool, in quarantine."""
    harness = Harness(R.QUARANTINED)
    harness.eye = Strangers(harness.kin, None, after_s=AFTER_S, free_memory_ratio=0.05)
    for _ in range(3):
        assert harness.saw(STRANGER) == []


def test_units_that_no_process_is_in_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """After some samples, once in the log, and as long as it is so: with a typo in them nobody is
    ever a stranger. Without units it is no news that a server cannot be told."""
    harness = Harness()
    server = msgspec.structs.replace(SERVER, units=("vlm.service",))
    harness.eye = Strangers(harness.kin, server, after_s=AFTER_S, free_memory_ratio=0.05)
    harness.saw(SERVERS, STRANGER)
    harness.kin.server = None
    for _ in range(2):
        harness.saw(SERVERS, STRANGER)
    assert harness.eye.unknown_server == ""
    for _ in range(5):
        harness.saw(SERVERS, STRANGER)
        assert "no process on a GPU is in vlm.service" in harness.eye.unknown_server
    assert len(caplog.records) == 1
    harness.kin.server = {SERVERS}
    harness.saw(SERVERS, STRANGER)
    assert harness.eye.unknown_server == ""
    silent = Harness()
    silent.kin.server = None
    for _ in range(5):
        silent.saw(SERVERS, STRANGER)
    assert silent.eye.unknown_server == ""
