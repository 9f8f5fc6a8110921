"""What a policy sees hangs on what happened and when: not on who asked, nor on who was rebuilt."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.state.events import PassDue
from coordinator.policies.contract.decisions import Allocation
from coordinator.policies.contract.snapshot import ClusterSnapshot
from tests.engine.house import House
from tests.engine.stopped_jobs import says


def running() -> House:
    """A job that has run for a while, and that something was said of since the last pass."""
    house = House(training=1, inference=0)
    job = house.submit("a", work_s=1e6)
    house.start(job, "t0")
    house.wait(5.0)
    says(house, job, 10, total_steps=1000)
    return house


def put_to_the_policy(engine: Engine, *, now_s: float) -> ClusterSnapshot:
    """What a pass at an instant decides on."""
    found: list[ClusterSnapshot] = []

    def allocate(snapshot: ClusterSnapshot, memory: bytes) -> Allocation:
        found.append(snapshot)
        return Allocation(decisions=())

    engine.policy = replace(engine.policy, allocate=allocate)
    engine.handle(PassDue(), now_s=now_s)
    return found[-1]


def test_a_question_changes_nothing_of_what_a_pass_sees() -> None:
    """Nor the instant of a view, as sums from another one are rounded otherwise: in a replay of the
    journal nobody asks."""
    asked, plain = running(), running()
    asked.engine.snapshot()
    at_s = plain.engine.state.now_s + 7.3
    seen = [put_to_the_policy(each.engine, now_s=at_s) for each in (asked, plain)]
    assert seen[0] == seen[1]


def test_who_is_rebuilt_from_a_snapshot_sees_what_the_one_that_saved_it_sees() -> None:
    """Views are not saved, so whoever saves the state makes its own anew as well."""
    house = running()
    put_to_the_policy(house.engine, now_s=house.engine.state.now_s + 1.1)
    saved = house.engine.encode_state()
    rebuilt = Engine(house.engine.settings, decode_state(saved))
    at_s = house.engine.state.now_s + 7.3
    seen = [put_to_the_policy(each, now_s=at_s) for each in (house.engine, rebuilt)]
    assert seen[0] == seen[1]
