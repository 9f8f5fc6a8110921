"""Numbers of jobs: one each, in the order of the journal, the same for every reader of it."""

from __future__ import annotations

import msgspec
from hypothesis import given
from hypothesis import strategies as st

from common.model import JobId
from coordinator.engine.engine import Engine, decode_state
from coordinator.engine.jobs import numbers
from coordinator.engine.state.events import JobSubmitted
from coordinator.engine.state.settings import EngineSettings
from tests.harness.builders import make_spec
from tests.harness.cluster.engine import EngineHarness

SPEC = make_spec("job")


def submitted(engine: Engine, *names: str) -> None:
    """Jobs enter, one after the other."""
    for name in names:
        event = JobSubmitted(job_id=JobId(name), spec=SPEC, tenant="lab", user="ada")
        engine.handle(event, now_s=engine.state.now_s)


def numbers_of(engine: Engine) -> dict[str, int]:
    """The numbers of all jobs."""
    return {str(job.job_id): job.number for job in engine.state.jobs.values()}


@given(st.lists(st.sampled_from("abcdefgh"), max_size=12), st.integers(0, 12))
def test_each_job_has_one_number_in_order_whether_or_not_a_snapshot_lies_between(
    names: list[str], cut: int
) -> None:
    """A job that is submitted twice keeps its number; a saved state goes on counting."""
    straight = Engine(EngineSettings())
    submitted(straight, *names)
    first = Engine(EngineSettings())
    submitted(first, *names[:cut])
    second = Engine(EngineSettings(), decode_state(first.encode_state()))
    submitted(second, *names[cut:])
    assert numbers_of(second) == numbers_of(straight)
    assert numbers_of(straight) == {name: n for n, name in enumerate(dict.fromkeys(names), start=1)}


def test_jobs_of_a_state_without_numbers_get_them_in_order_of_submission() -> None:
    """An older coordinator saved it."""
    engine = Engine(EngineSettings())
    submitted(engine, "b", "a", "c")
    state = msgspec.msgpack.decode(engine.encode_state())
    del state["next_job_number"]
    for job in state["jobs"].values():
        del job["number"]
    again = Engine(EngineSettings(), decode_state(msgspec.msgpack.encode(state)))
    submitted(again, "d")
    assert numbers_of(again) == {"b": 1, "a": 2, "c": 3, "d": 4}


def test_a_job_that_is_rebuilt_from_a_ledger_has_its_number_and_its_own_variables() -> None:
    """JetStream is lost while no coordinator leads; people still know the job by its number."""
    harness = EngineHarness(training=2, inference=0)
    harness.submit("first")
    job = harness.submit("second")
    harness.start(job, "t0")
    harness.wait(2.0)
    harness.lose_journal()
    [rebuilt] = harness.engine.state.jobs.values()
    assert (rebuilt.job_id, rebuilt.number) == (job.job_id, 2)
    assert numbers.VARIABLE not in rebuilt.spec.env
    assert harness.submit("third").number == 3


def test_a_number_that_another_job_has_by_now_is_not_given_twice() -> None:
    """A job came in before the ledger of the node that ran an older one was read."""
    engine = Engine(EngineSettings())
    submitted(engine, "a", "b")
    engine.state.jobs[JobId("b")].number = 0
    numbers.give(engine.state, engine.state.jobs[JobId("b")], wanted=1)
    assert numbers_of(engine) == {"a": 1, "b": 3}


@given(st.text(max_size=20))
def test_any_value_of_the_variable_in_an_order_is_a_number_or_none(text: str) -> None:
    """A ledger may hold anything."""
    spec, number = numbers.recovered(msgspec.structs.replace(SPEC, env={numbers.VARIABLE: text}))
    assert spec == SPEC
    assert number is None or number >= 0
