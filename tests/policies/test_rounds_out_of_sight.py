"""Shares in rounds of jobs that the rules of tenants hide from policies for some passes."""

from __future__ import annotations

import msgspec
import pytest
from msgspec import structs

from common.model import JobId, Preemptibility
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.gavel.rounds import Rounds, Turn
from coordinator.policies.tenants.attempts import without
from tests.builders import NOW_S
from tests.served import cell
from tests.served import served_job as job


def hidden(snapshot: ClusterSnapshot, name: str) -> ClusterSnapshot:
    """The snapshot as a policy has it that must not see this job."""
    return without(snapshot, {JobId(name)})


def test_a_hidden_job_is_owed_what_rounds_could_have_given_it() -> None:
    """It waits for 1,000 s with a share of a half and is out of sight from the 100th to the 350th:
    750 s of sight count, and what its work took alone is still known."""
    made = policy("las:round_s=100")
    waits, other = JobId("waits"), JobId("other")
    turns = {
        name: Turn(share=0.5, received_s=50.0, alone_s=7.0, left_s=3600.0, gpus=1)
        for name in (waits, other)
    }
    set_at_s = NOW_S - 100.0
    memory = msgspec.msgpack.encode(
        Rounds(
            begun_at_s=set_at_s,
            noted_at_s=set_at_s,
            solved_at_s=set_at_s,
            is_stale=False,
            turns=turns,
        )
    )
    runs = structs.replace(
        job("other", 1, node="n0"), started_at_s=set_at_s, preemptibility=Preemptibility.NON
    )
    snapshot = cell([job("waits", 1), runs], n0=1)
    for after_s in (0.0, 150.0):
        later = structs.replace(snapshot, now_s=NOW_S + after_s)
        memory = made.allocate(hidden(later, waits), memory).memory
        kept = msgspec.msgpack.decode(memory, type=Rounds)
        assert kept.turns.keys() == {other}
        assert (kept.away[waits].open_s, kept.away[waits].owed_s) == (100.0, 0.0)
    back = structs.replace(snapshot, now_s=NOW_S + 250.0)
    memory = made.allocate(back, memory).memory
    kept = msgspec.msgpack.decode(memory, type=Rounds)
    assert NOW_S + 250.0 - kept.turns[waits].since_s == 100.0
    solved = structs.replace(snapshot, now_s=NOW_S + 900.0)
    after = msgspec.msgpack.decode(made.allocate(solved, memory).memory, type=Rounds)
    assert after.solved_at_s == NOW_S + 900.0
    assert after.turns[waits].owed_s == pytest.approx(0.5 * (100.0 + 650.0))
    assert after.turns[waits].alone_s == 7.0
    gone = cell([runs], n0=1, now_s=NOW_S + 160.0)
    memory = made.allocate(hidden(snapshot, waits), msgspec.msgpack.encode(kept)).memory
    kept = msgspec.msgpack.decode(made.allocate(gone, memory).memory, type=Rounds)
    assert kept.turns.keys() == {other}
    assert not kept.away


def test_an_account_out_of_sight_is_closed_where_shares_are_set_meanwhile() -> None:
    """It is owed its old share of the time until it was hidden, and its next account begins when it
    is seen again."""
    waits = JobId("waits")
    made = policy("las:round_s=100")
    runs = structs.replace(
        job("other", 1, node="n0"), started_at_s=NOW_S, preemptibility=Preemptibility.NON
    )
    both = cell([job("waits", 1), runs], n0=1)
    memory = made.allocate(both, b"").memory
    shares = msgspec.msgpack.decode(memory, type=Rounds).turns
    assert shares[waits].share == pytest.approx(0.5)
    for after_s in (100.0, 1000.0):
        later = structs.replace(both, now_s=NOW_S + after_s)
        memory = made.allocate(hidden(later, waits), memory).memory
    kept = msgspec.msgpack.decode(memory, type=Rounds)
    assert kept.solved_at_s == NOW_S + 1000.0
    assert kept.away[waits].owed_s == pytest.approx(0.5 * 100.0)
    memory = made.allocate(structs.replace(both, now_s=NOW_S + 1300.0), memory).memory
    turn = msgspec.msgpack.decode(memory, type=Rounds).turns[waits]
    assert (turn.since_s, turn.received_s) == (NOW_S + 1300.0, 50.0)


@pytest.mark.parametrize("name", ["las", "themis-lp"])
def test_who_is_hidden_for_an_instant_gets_no_more_than_its_share(name: str) -> None:
    """Two like jobs on one GPU have half of it each, though one of them is hidden for a second of
    each round in which it waits."""
    made, memory = policy(f"{name}:round_s=100"), b""
    got, running, since_s = {"a": 0.0, "b": 0.0}, "", 0.0
    for step in range(40):
        for after_s in (0.0, 50.0, 51.0):
            now_s = NOW_S + step * 100.0 + after_s
            if running:
                got[running] += {0.0: 49.0, 50.0: 50.0, 51.0: 1.0}[after_s]
            jobs = [
                structs.replace(
                    job(each, 1, node="n0" if each == running else "", served=got[each]),
                    started_at_s=since_s if each == running else None,
                    saves_when_asked=True,
                    has_saved=True,
                )
                for each in got
            ]
            snapshot = cell(jobs, n0=1, now_s=now_s)
            is_hidden = after_s == 50.0 and running != "a"
            found = made.allocate(hidden(snapshot, "a") if is_hidden else snapshot, memory)
            memory = found.memory
            for each in found.decisions:
                if isinstance(each, Start):
                    running, since_s = each.job_id, now_s
    assert sum(got.values()) == pytest.approx(3951.0)
    assert abs(got["a"] - got["b"]) <= 100.0


def test_who_was_out_of_sight_at_each_solving_has_a_share_with_the_next_round() -> None:
    """Who is new waits for the next solving; it may be hidden then, and at each one after it."""
    made = policy("las:round_s=100")
    runs = structs.replace(job("other", 1, node="n0"), started_at_s=NOW_S)
    first = made.allocate(cell([runs], n0=1), b"").memory
    late = job("late", 1, submitted_at_s=NOW_S + 10.0)

    def solved_at_s(memory: bytes) -> float | None:
        return msgspec.msgpack.decode(memory, type=Rounds).solved_at_s

    def seen(after_s: float, memory: bytes) -> bytes:
        return made.allocate(cell([runs, late], n0=1, now_s=NOW_S + after_s), memory).memory

    memory = seen(20.0, first)
    assert solved_at_s(seen(100.0, memory)) == NOW_S  # it is new
    away = hidden(cell([runs, late], n0=1, now_s=NOW_S + 30.0), "late")
    memory = seen(100.0, made.allocate(away, memory).memory)
    assert solved_at_s(memory) == NOW_S + 100.0
    turn = msgspec.msgpack.decode(memory, type=Rounds).turns[JobId("late")]
    assert turn.share == pytest.approx(0.5)
