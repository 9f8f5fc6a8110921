"""What policies remember of jobs that the rules of tenants hide from them for some passes: places
in lines, turns, tries, and shares in rounds."""

from __future__ import annotations

from collections.abc import Iterable

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from msgspec import structs

from common.model import JobId, NodeName, Preemptibility
from coordinator.engine.state.settings import TenantSettings
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.afs.policy import LEASE_S
from coordinator.policies.schedulers.gandiva.node_sets import Class, Division, NodeSet
from coordinator.policies.schedulers.gavel.rounds import Rounds, Turn
from coordinator.policies.schedulers.philly.gang_reservation import Attempted
from coordinator.policies.schedulers.themis.finish_time_fairness import Attendance
from coordinator.policies.schedulers.tiresias.queues import Line, QueueKnobs, QueueMemory, Queues
from coordinator.policies.tenants.attempts import without
from tests.harness.builders import NOW_S, job_with, make_job_view, make_snapshot
from tests.harness.served import cell
from tests.harness.served import served_job as job
from tests.policies.tenant_passes import Asked, Cell


def hidden(snapshot: ClusterSnapshot, *names: str) -> ClusterSnapshot:
    """The snapshot as a policy has it that must not see these jobs."""
    return without(snapshot, {JobId(name) for name in names})


# --- Tiresias' queues ---------------------------------------------------------------------------

ENTRY = QueueKnobs(line=Line.ENTRY)


def entered(memory: QueueMemory, *jobs: JobView, now_s: float, unseen: str = "") -> Queues:
    """The queues of these jobs, by entry; those named by letters in `unseen` are hidden."""
    return Queues(ENTRY, hidden(cell(jobs, n0=8, now_s=now_s), *unseen), memory)


def test_in_the_order_of_entry_a_hidden_job_keeps_its_place() -> None:
    """It stands before who came after it, though it was out of sight when that came."""
    first = job("z", 8, submitted_at_s=1.0)
    others = [job("y", 8, submitted_at_s=2.0), job("x", 8, submitted_at_s=3.0)]
    memory = entered(QueueMemory(), first, others[0], now_s=NOW_S).memory
    memory = entered(memory, first, *others, now_s=NOW_S + 1.0, unseen="z").memory
    queues = entered(memory, first, *others, now_s=NOW_S + 2.0)
    line = sorted([first, *others], key=queues.rank)
    assert [each.job_id for each in line] == ["z", "y", "x"]


def test_a_hidden_job_stands_behind_those_of_its_queue_that_run() -> None:
    """It waits: whoever was given the GPUs meanwhile is before it, as before all that wait."""
    waits = [job("z", 8, submitted_at_s=1.0), job("y", 8, submitted_at_s=2.0)]
    memory = entered(QueueMemory(), *waits, now_s=NOW_S).memory
    after = waits[0], job("y", 8, node="n0", submitted_at_s=2.0)
    memory = entered(memory, *after, now_s=NOW_S + 1.0, unseen="z").memory
    assert memory.queues[0] == ("y", "z")


def test_who_has_gone_is_forgotten_also_when_it_was_hidden() -> None:
    """Nothing is remembered of jobs that are neither seen nor told to be live."""
    waits = [job("z", 8), job("y", 8)]
    memory = entered(QueueMemory(promoted={JobId("z"): 1.0}), *waits, now_s=NOW_S).memory
    memory = entered(memory, *waits, now_s=NOW_S + 1.0, unseen="z").memory
    assert (memory.promoted, memory.queues[0]) == ({"z": 1.0}, ("y", "z"))
    memory = entered(memory, waits[1], now_s=NOW_S + 2.0).memory
    assert (memory.promoted, memory.queues[0]) == ({}, ("y",))


@pytest.mark.parametrize("line", list(Line))
def test_a_return_to_the_first_queue_is_not_forgotten_out_of_sight(line: Line) -> None:
    """Its service counts from that return, whether it was seen in every pass since or not."""
    knobs = QueueKnobs(promote=2.0, line=line)
    waits = job("waits", 8, served=7300.0, first_s=1.0)
    # It was back in the first queue at 7200 GPU-s; where that is kept, it stands in that.
    memory = QueueMemory({waits.job_id: 7200.0}, ((waits.job_id,), ()), NOW_S - 9.0)
    snapshot = cell([waits, job("other", 8)], n0=8)
    memory = Queues(knobs, hidden(snapshot, "waits"), memory).memory
    again = Queues(knobs, structs.replace(snapshot, now_s=NOW_S + 1.0), memory)
    assert again.number(waits) == 0
    assert again.service_gpu_s(waits) == 100.0


def test_a_wait_out_of_sight_counts_for_the_return() -> None:
    """Who was hidden has waited since its stop like any other: it is back in the first queue in
    the pass that sees it again, and no pass before asks for it."""
    knobs = QueueKnobs(promote=2.0)
    waits = job("waits", 8, served=7200.0, first_s=1.0, waits_since_s=NOW_S)  # it ran for 900 s
    other = job("other", 8)
    memory = Queues(knobs, cell([waits, other], n0=8), QueueMemory()).memory
    later = cell([waits, other], n0=8, now_s=NOW_S + 1800.0)
    out = Queues(knobs, hidden(later, "waits"), memory)
    assert out.memory.promoted == {}
    assert out.wake_at_s([], [other]) is None
    assert Queues(knobs, later, out.memory).number(waits) == 0
    early = structs.replace(later, now_s=NOW_S + 1799.0)
    assert Queues(knobs, early, out.memory).number(waits) == 1


@settings(max_examples=100, deadline=None)
@given(
    passes=st.lists(st.sets(st.sampled_from("abcdef")), min_size=1, max_size=6),
    line=st.sampled_from(list(Line)),
)
def test_hiding_who_waits_changes_nothing_for_anybody_later(
    passes: list[set[str]], line: Line
) -> None:
    """However often jobs that wait are out of sight, once all are seen each stands where it would
    stand had it never been hidden."""
    knobs = QueueKnobs(limits=(100.0, 200.0), line=line, promote=3.0)
    jobs = [
        job(name, 1, served=50.0 * at, first_s=float(at), submitted_at_s=float(at))
        for at, name in enumerate("abcdef")
    ]
    start = cell(jobs, n0=8)
    seen = unseen = Queues(knobs, start, QueueMemory(promoted={JobId("f"): 240.0})).memory
    for step, names in enumerate(passes, start=1):
        later = structs.replace(start, now_s=NOW_S + step)
        seen = Queues(knobs, later, seen).memory
        unseen = Queues(knobs, hidden(later, *names), unseen).memory
    end = structs.replace(start, now_s=NOW_S + len(passes) + 1)
    plain, after = Queues(knobs, end, seen), Queues(knobs, end, unseen)
    for each in jobs:
        assert (plain.number(each), plain.rank(each)) == (after.number(each), after.rank(each))


# --- Gandiva's sets -----------------------------------------------------------------------------

ONE, FOUR = Class(1, "H100", 1), Class(4, "H100", 1)


def division(jobs: str, unseen: Iterable[str] = (), nodes: int = 1) -> Division:
    """One set for gangs of four on the first of so many nodes of four GPUs."""
    names = [NodeName(f"n{number}") for number in range(nodes)]
    made = NodeSet(FOUR, (names[0],), [JobId(name) for name in jobs])
    gpus, types = dict.fromkeys(names, 4), dict.fromkeys(names, "H100")
    return Division([made], gpus=gpus, types=types, unseen=frozenset(map(JobId, unseen)))


def test_a_hidden_job_has_no_turn_and_keeps_its_place_among_those_that_wait() -> None:
    """The next in line computes instead; it stays before those that would come after it."""
    found = division("abc", unseen="b")
    found.rotate(())
    assert found.computing(found.sets[0]) == ["c"]
    found.first({})
    assert found.sets[0].jobs == ["c", "b", "a"]


def test_who_comes_back_into_sight_ends_nobodys_turn() -> None:
    """Who computes stands before it, also where it waited longer: its turn is the next one."""
    found = division("bca", unseen="b")
    found.first({})
    again = division("".join(found.sets[0].jobs))
    assert again.computing(again.sets[0]) == ["c"]
    again.rotate(())
    assert again.computing(again.sets[0]) == ["b"]


def test_a_hidden_job_asks_for_no_nodes() -> None:
    """It is no load, shares no set, takes no newcomer's room; a set of hidden ones is dissolved."""
    found = division("ab", unseen="ab", nodes=2)
    assert not found.is_shared
    assert found.load(found.sets[0])[0] == 0
    assert found.place(JobId("c"), [FOUR], ())
    assert [each.jobs for each in found.sets] == [["a", "b", "c"]]
    found.keep([JobId("c")])
    assert [each.jobs for each in found.sets] == [["a", "b", "c"]]
    found.keep([])
    assert found.sets == []


@pytest.mark.parametrize("has_set", [False, True])
def test_who_comes_back_into_sight_is_nobody_new(has_set: bool) -> None:
    """Where only newcomers are looked at until none came for `quiet_s`, that time goes on: also for
    a job whose set was dissolved while it was hidden, and for one that never had any."""
    name = "gandiva-sets:quiet_s=1000"
    runs = job("runs", 4, node="n0")
    waits = job("waits", 4 if has_set else 1, submitted_at_s=1.0)
    came = job("wide", 4, workers=3, submitted_at_s=50.0)
    memory = policy(name).allocate(cell([runs, waits], n0=4), b"").memory
    both = cell([waits, came], n0=4, now_s=NOW_S + 60.0)  # what ran has ended: its set goes
    looked = policy(name).allocate(hidden(both, "waits"), memory)
    assert looked.wake_at_s == NOW_S + 1060.0
    again = policy(name).allocate(structs.replace(both, now_s=NOW_S + 500.0), looked.memory)
    assert again.wake_at_s == NOW_S + 1060.0
    late = policy(name).allocate(structs.replace(both, now_s=NOW_S + 1060.0), again.memory)
    assert [made.job_id for made in late.decisions if isinstance(made, Start)] == ["waits"]


def test_who_was_never_seen_is_new_when_it_is() -> None:
    """A look is for whoever can be given something: it came in the pass that sees it first."""
    name = "gandiva-sets:quiet_s=1000"
    both = cell([job("a", 4, node="n0"), job("b", 4, submitted_at_s=1.0)], n0=4)
    first = policy(name).allocate(hidden(both, "b"), b"")
    later = structs.replace(both, now_s=NOW_S + 500.0)
    assert policy(name).allocate(later, first.memory).wake_at_s == NOW_S + 1500.0


def test_who_has_a_turn_keeps_it_while_all_others_are_hidden() -> None:
    """There is nobody to hand it to."""
    found = division("ab", unseen="b")
    found.rotate(())
    assert found.sets[0].jobs == ["a", "b"]


def test_nodes_are_shared_out_by_those_that_are_seen() -> None:
    """Four gangs of which three are hidden leave the loose node to eight jobs of another size."""
    names = list(map(NodeName, ("n0", "n1", "n2")))
    sets = [
        NodeSet(FOUR, (names[0],), list(map(JobId, "abcd"))),
        NodeSet(ONE, (names[1],), list(map(JobId, "ijklmnop"))),
    ]
    gpus, types = dict.fromkeys(names, 4), dict.fromkeys(names, "H100")
    found = Division(sets, gpus=gpus, types=types, unseen=frozenset(map(JobId, "bcd")))
    found.divide(counts_by_gang=False)
    assert {each.nodes: len(each.jobs) for each in found.sets} == {
        ("n0",): 4,
        ("n1",): 4,
        ("n2",): 4,
    }


def test_those_that_are_seen_spread_over_the_sets_of_their_size() -> None:
    """The last of them in line goes to a new set, and to one where all others are hidden; who is
    hidden stays where it is."""
    found = division("adbc", unseen="bc", nodes=2)
    found.divide(counts_by_gang=False)
    assert [each.jobs for each in found.sets] == [["a", "b", "c"], ["d"]]
    found = division("ade", unseen="bc", nodes=3)
    found.sets.append(NodeSet(FOUR, (NodeName("n1"),), [JobId("b"), JobId("c")]))
    found.divide(counts_by_gang=False)
    assert [each.jobs for each in found.sets] == [["a"], ["b", "c", "e"], ["d"]]


def test_of_two_alike_of_a_tenant_the_first_in_line_has_its_turn_first() -> None:
    """Shares hide the jobs of three tenants in turns: who waits longer is not the last in line for
    having been out of sight more often."""
    tenants = [
        TenantSettings(name="a", borrow_limit_gpus=8),
        TenantSettings(name="b"),
        TenantSettings(name="c"),
    ]
    played = Cell("gandiva-sets", tenants, nodes=1, check=True)
    played.ask(
        Asked(tenant=tenant, gpus=8, at_s=float(at), work_s=3600.0)
        for at, tenant in enumerate("bcaabc")
    )
    played.run(until_s=40_000.0)
    first, second = (played.engine.state.jobs[JobId(name)] for name in ("c1", "c5"))
    assert first.finished_at_s is not None
    assert second.finished_at_s is not None
    assert first.finished_at_s < second.finished_at_s


def test_what_is_said_of_a_line_counts_who_may_have_a_turn() -> None:
    """Of three jobs before it a job waits for two, while a quota keeps the third one out."""
    made = policy("gandiva-sets")
    jobs = [job(name, 8, submitted_at_s=float(at)) for at, name in enumerate("abcd")]
    whole = cell(jobs, n0=8)

    def said(snapshot: ClusterSnapshot) -> list[str]:
        holds = made.pending_reasons(snapshot, made.allocate(whole, b"").memory)
        return [each.blockers[0] for each in holds if each.job_id == "d"]

    assert said(whole) == ["waits for its turn in the set n0: 3 jobs before it, room for 1"]
    partly = hidden(whole, "b")
    assert said(partly) == ["waits for its turn in the set n0: 2 jobs before it, room for 1"]
    found = made.allocate(partly, made.allocate(whole, b"").memory)
    (start,) = (each for each in found.decisions if isinstance(each, Start))
    assert start.reason.endswith("for gangs of 8 GPUs: 3 jobs, room for 1")


# --- the age of a gang's tries under Philly -------------------------------------------------------


def test_the_tries_of_a_gang_go_on_out_of_sight_and_it_holds_nothing() -> None:
    """Whoever waits ages, whatever for: else it would ask for the strictest locality again."""
    made = policy("philly")
    gang = job("gang", 8, submitted_at_s=1.0)
    others = [
        structs.replace(job(f"on-{node}", gpus, node=node), tenant="other")
        for node, gpus in (("n0", 2), ("n1", 6))
    ]
    snapshot = cell([gang, *others], n0=8, n1=8)
    first = made.allocate(snapshot, b"")
    assert tries(first.memory) == {"gang": Attempted(NOW_S, {NodeName("n0"): 6})}
    later = structs.replace(snapshot, now_s=NOW_S + 60.0)
    memory = made.allocate(hidden(later, "gang"), first.memory).memory
    assert tries(memory) == {"gang": Attempted(NOW_S)}
    small = job("small", 6, submitted_at_s=2.0)
    beside = cell([gang, *others, small], n0=8, n1=8, now_s=NOW_S + 60.0)
    found = made.allocate(hidden(beside, "gang"), first.memory)
    assert [each.job_id for each in found.decisions if isinstance(each, Start)] == ["small"]
    again = made.allocate(structs.replace(snapshot, now_s=NOW_S + 100.0), memory)
    assert tries(again.memory) == {"gang": Attempted(NOW_S, {NodeName("n0"): 6})}
    assert tries(made.allocate(cell([], n0=8), memory).memory) == {}


def tries(memory: bytes) -> dict[JobId, Attempted]:
    """What Philly remembers."""
    return msgspec.msgpack.decode(memory, type=dict[JobId, Attempted])


# --- turns and shares -----------------------------------------------------------------------------


def test_a_job_that_had_its_turn_does_not_come_back_as_one_that_had_none() -> None:
    """Under AFS-P fewest turns go first: the lease that ended counts after any passes unseen."""
    made = policy("afs-p")
    old = job("old", 8, node="n0", served=1.0, first_s=NOW_S)
    memory = made.allocate(cell([old], n0=8), b"").memory
    stopped = job("old", 8, served=1.0, first_s=NOW_S)
    for step in (0.0, 1.0):
        snapshot = cell([stopped], n0=8, now_s=NOW_S + LEASE_S + step)
        memory = made.allocate(hidden(snapshot, "old"), memory).memory
    new = job("new", 8, submitted_at_s=NOW_S)
    snapshot = cell([stopped, new], n0=8, now_s=NOW_S + LEASE_S + 2.0)
    found = made.allocate(snapshot, memory)
    assert [each.job_id for each in found.decisions if isinstance(each, Start)] == ["new"]
    gone = made.allocate(cell([new], n0=8, now_s=NOW_S + LEASE_S + 3.0), found.memory)
    assert msgspec.msgpack.decode(gone.memory)["turns"].keys() == {"new"}


# --- apps of Themis -------------------------------------------------------------------------------


def test_an_app_out_of_sight_comes_back_with_what_is_known_of_it() -> None:
    """Its trials that ended, what it was given, and since when it is there; meanwhile it is none of
    those that share the GPUs."""
    attendance = Attendance()

    def note(now_s: float, jobs: Iterable[JobView], *unseen: str) -> None:
        snapshot = make_snapshot(jobs=jobs, now_s=now_s)
        attendance.note(hidden(snapshot, *unseen))

    trial, ended = (
        structs.replace(make_job_view(name, remaining_work_s=100.0), app="app")
        for name in ("trial", "ended")
    )
    other = make_job_view("other", remaining_work_s=100.0)
    note(0.0, [trial, ended, other])
    (name,) = (app for app in attendance.apps if app.startswith("app"))
    attendance.apps[name].granted_at_s = 5.0
    note(100.0, [trial, other])
    note(200.0, [trial, other], "trial")
    assert attendance.apps.keys() == {"job other"}
    note(300.0, [trial, other], "trial")
    note(400.0, [trial, other])
    record = attendance.apps[name]
    assert record.jobs.keys() == {"trial", "ended"}
    assert record.granted_at_s == 5.0
    # Two apps for 200 s, then one for 200 s.
    assert attendance.mean_apps(record) == pytest.approx(1.5)
    assert attendance.unseen == {}
    second = structs.replace(make_job_view("second", remaining_work_s=100.0), app="app")
    note(440.0, [trial, second, other])
    note(450.0, [trial, second, other], "second")
    assert attendance.unseen == {}  # a part of it is seen
    note(500.0, [trial, other], "trial")
    note(600.0, [other])
    assert attendance.unseen == {}


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
    runs = job_with(
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
    runs = job_with(
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
                job_with(
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
    runs = job_with(job("other", 1, node="n0"), started_at_s=NOW_S)
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
