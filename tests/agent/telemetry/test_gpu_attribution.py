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
from tests.agent.bench import SERVER, settings

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


class House:
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
    house = House()
    assert house.saw(SERVERS, CHILD, STRANGER) == []
    assert house.saw(SERVERS, CHILD, STRANGER, same=True) == []
    assert house.saw(SERVERS, CHILD, STRANGER, OTHER) == [STRANGER]
    assert house.saw(SERVERS, CHILD, STRANGER, OTHER) == [STRANGER, OTHER]
    assert house.saw(SERVERS, OTHER) == [OTHER]


def test_while_a_server_restarts_nobody_new_is_a_stranger() -> None:
    """Its old processes and its new ones are on the GPU together; who was one before stays one."""
    house = House()
    for _ in range(2):
        house.saw(SERVERS, STRANGER)
    house.is_healthy = False
    for _ in range(3):
        assert house.saw(SERVERS, CHILD, STRANGER, OTHER) == [STRANGER]
    assert house.saw(SERVERS, CHILD) == []
    assert house.saw(SERVERS, CHILD, STRANGER) == [], "it left, and nobody can tell who that is"


def test_where_nobody_can_tell_the_server_nobody_is_accused() -> None:
    """Such as a server of another account without its units in the settings; but who was left
    behind when it had stopped is known."""
    house = House()
    house.kin.server = None
    house.memory.left_behind = [OTHER]
    for _ in range(3):
        assert house.saw(SERVERS, STRANGER, OTHER) == [OTHER]


@pytest.mark.parametrize("role", [R.TRAINING, R.ON_LOAN])
def test_beside_workers_it_is_whoever_is_no_workers(role: NodeRole) -> None:
    """At once, the server's process among them: it has no business there."""
    house = House(role)
    assert house.saw(WORKER, SERVERS, STRANGER) == [SERVERS, STRANGER]
    house.kin.dead = {STRANGER}
    assert house.saw(WORKER, STRANGER) == []


def test_what_is_left_of_a_stopped_server_is_no_stranger() -> None:
    """It may take a while to end; who was beside it, or came since and stays, is one."""
    house = House()
    house.saw(SERVERS, CHILD)
    house.memory.is_server_stopped = True
    assert house.saw(CHILD, OTHER, role=R.DRAINING) == []
    assert house.saw(CHILD, OTHER) == [OTHER]
    assert house.eye.others == {CHILD, OTHER}
    assert house.saw(CHILD, OTHER, role=R.VACATING) == [OTHER]


@pytest.mark.parametrize(
    ("role", "is_stopped"), [(R.SERVING, False), (R.DRAINING, False), (R.DRAINING, True)]
)
def test_who_is_there_for_a_moment_is_no_stranger_to_a_node_that_could_be_lent(
    role: NodeRole, is_stopped: bool
) -> None:
    """However many samples show it; it is told as one that may become one, and does by staying."""
    house = House()
    house.saw(SERVERS)
    house.memory.is_server_stopped = is_stopped
    for pid in range(40, 50):  # a diagnostic, with another pid each time
        for _ in range(4):
            assert house.saw(SERVERS, pid, role=role, later_s=AFTER_S / 4) == []
            assert house.eye.suspects == {pid}
        assert house.saw(SERVERS, later_s=AFTER_S / 4) == []
        assert house.eye.suspects == frozenset()
    for _ in range(4):
        assert house.saw(SERVERS, STRANGER, later_s=AFTER_S / 4) == []
    assert house.saw(SERVERS, STRANGER, later_s=AFTER_S / 4) == [STRANGER]
    assert house.eye.suspects == frozenset()


@pytest.mark.parametrize(
    ("role", "is_stopped"), [(R.SERVING, False), (R.DRAINING, False), (R.DRAINING, True)]
)
def test_processes_that_follow_each_other_on_a_gpu_are_one_stranger_in_the_end(
    role: NodeRole, is_stopped: bool
) -> None:
    """None of them stays, and somebody is always there: a loan would wait for ever to see who."""
    house = House()
    house.saw(SERVERS)
    house.memory.is_server_stopped = is_stopped
    looks = int(STREAM_RATIO * 2)
    for pid in range(40, 40 + looks):
        assert house.saw(SERVERS, pid, role=role, later_s=AFTER_S / 2) == []
        assert house.eye.suspects == {pid}
    for pid in range(90, 95):
        assert house.saw(SERVERS, pid, later_s=AFTER_S / 2) == [pid], "the newest, by name"
        assert house.saw(SERVERS, pid, same=True) == [pid]
    assert house.saw(SERVERS, 95, 96, later_s=AFTER_S / 2) == [96]
    assert house.saw(SERVERS, later_s=AFTER_S / 2) == []
    assert house.saw(SERVERS, 99, later_s=AFTER_S / 2) == [], "its time begins anew"


def test_a_gap_in_the_samples_of_a_process_begins_its_time_anew() -> None:
    """It may be another one of the same pid, and nobody was in the way meanwhile."""
    house = House()
    for _ in range(3):
        assert house.saw(SERVERS, STRANGER, later_s=AFTER_S / 2) == []
        assert house.saw(SERVERS, later_s=AFTER_S / 2) == []
    for is_healthy in (True, False, True):
        house.is_healthy = is_healthy
        assert house.saw(SERVERS, STRANGER) == [], "nobody could tell in between"


def test_a_way_home_waits_for_nobody_to_stay() -> None:
    """Whoever is seen once, and is not the server's, is one that the server is started beside."""
    house = House()
    house.saw(SERVERS, CHILD)
    house.memory.is_server_stopped = True
    assert house.saw(CHILD, OTHER, role=R.DRAINING) == []
    assert house.saw(CHILD, OTHER, role=R.VACATING, later_s=0.01) == [OTHER]


def test_of_an_unknown_server_that_was_stopped_all_may_be_its_own() -> None:
    """All are told as others, for whoever waits for them."""
    house = House()
    house.kin.server = None
    house.saw(SERVERS, STRANGER)
    house.memory.is_server_stopped = True
    assert house.saw(SERVERS, STRANGER, role=R.DRAINING) == []
    assert house.eye.others == {SERVERS, STRANGER}


def test_a_server_that_was_known_once_is_not_for_ever() -> None:
    """Another one may have taken its place since, whose processes nobody knows."""
    house = House()
    house.saw(SERVERS)
    house.kin.server = None
    house.saw(CHILD, STRANGER)
    house.memory.is_server_stopped = True
    assert house.saw(CHILD, STRANGER, role=R.DRAINING) == []


def test_after_a_loan_it_is_whoever_is_no_workers() -> None:
    """The GPUs were free of the server when the loan began, whoever could tell it then."""
    house = House()
    house.kin.server = None
    house.saw(SERVERS)
    house.memory.is_server_stopped = True
    house.saw(WORKER, role=R.ON_LOAN)
    assert house.saw(WORKER, STRANGER, role=R.VACATING) == [STRANGER]
    assert house.eye.others == {STRANGER}
    assert house.saw(SERVERS, STRANGER, role=R.WARMING) == [STRANGER]
    assert house.eye.others == frozenset()
    assert house.saw(SERVERS, STRANGER, role=R.SERVING) == [STRANGER]


def test_a_server_that_was_started_beside_a_stranger_is_told_from_it() -> None:
    """Its new processes are its own."""
    house = House(R.WARMING)
    house.saw(CHILD)
    assert house.saw(SERVERS, CHILD, STRANGER, role=R.SERVING) == []
    assert house.saw(SERVERS, CHILD, STRANGER) == [STRANGER]


@pytest.mark.parametrize("role", [R.TRAINING, R.ON_LOAN, R.VACATING])
def test_where_a_worker_starts_only_those_are_strangers_that_were_before(role: NodeRole) -> None:
    """Until its shim has said which process it is, whoever is new on its GPUs may be it; elsewhere
    on the node it is not."""
    house = House(R.ON_LOAN)
    assert house.saw(STRANGER) == [STRANGER]
    house.memory.role = role
    gpus = tuple(
        GpuReport(
            uuid=GpuUuid(f"GPU-{index}"), index=index, gpu_type="H100", memory_total_bytes=1,
            processes=tuple(GpuProcess(pid=pid) for pid in pids),
        )
        for index, pids in enumerate([(STRANGER, OTHER), (SERVERS,)])
    )  # fmt: skip
    look = Look(at_s=9.0, gpus=gpus, owners=(), is_healthy=False, unnamed=frozenset({gpus[0].uuid}))
    house.eye.saw(look, house.memory)
    assert house.eye.found == ((STRANGER, "GPU-0"), (SERVERS, "GPU-1"))
    house.eye.saw(msgspec.structs.replace(look, at_s=10.0, unnamed=frozenset()), house.memory)
    assert (OTHER, "GPU-0") in house.eye.found


def test_whoever_may_be_a_worker_that_starts_is_a_stranger_on_the_other_gpus() -> None:
    """Its worker was not given those; one process may be on several."""
    house = House(R.TRAINING)
    gpus = tuple(
        GpuReport(
            uuid=GpuUuid(f"GPU-{index}"), index=index, gpu_type="H100", memory_total_bytes=1,
            processes=(GpuProcess(pid=OTHER),),
        )
        for index in range(2)
    )  # fmt: skip
    look = Look(at_s=9.0, gpus=gpus, owners=(), is_healthy=False, unnamed=frozenset({gpus[0].uuid}))
    house.eye.saw(look, house.memory)
    assert house.eye.found == ((OTHER, "GPU-1"),)


def test_a_look_that_sees_no_gpu_shows_nobody_gone() -> None:
    """NVML did not answer: whoever was there may be there."""
    house = House()
    for _ in range(2):
        house.saw(SERVERS, STRANGER)
    look = Look(at_s=9.0, gpus=None, owners=(), is_healthy=True)
    house.eye.saw(look, house.memory)
    assert [pid for pid, _ in house.eye.found] == [STRANGER]


def test_a_node_without_a_server_accuses_nobody_between_its_roles() -> None:
    """Of the training pool, in quarantine."""
    house = House(R.QUARANTINED)
    house.eye = Strangers(house.kin, None, after_s=AFTER_S, free_memory_ratio=0.05)
    for _ in range(3):
        assert house.saw(STRANGER) == []


def test_units_that_no_process_is_in_are_told(caplog: pytest.LogCaptureFixture) -> None:
    """After some samples, once in the log, and as long as it is so: with a typo in them nobody is
    ever a stranger. Without units it is no news that a server cannot be told."""
    house = House()
    server = msgspec.structs.replace(SERVER, units=("vlm.service",))
    house.eye = Strangers(house.kin, server, after_s=AFTER_S, free_memory_ratio=0.05)
    house.saw(SERVERS, STRANGER)
    house.kin.server = None
    for _ in range(2):
        house.saw(SERVERS, STRANGER)
    assert house.eye.unknown_server == ""
    for _ in range(5):
        house.saw(SERVERS, STRANGER)
        assert "no process on a GPU is in vlm.service" in house.eye.unknown_server
    assert len(caplog.records) == 1
    house.kin.server = {SERVERS}
    house.saw(SERVERS, STRANGER)
    assert house.eye.unknown_server == ""
    silent = House()
    silent.kin.server = None
    for _ in range(5):
        silent.saw(SERVERS, STRANGER)
    assert silent.eye.unknown_server == ""
