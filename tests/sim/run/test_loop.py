"""The heap of simulated time: its order, calls that are planned ahead, and where it stops."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from hypothesis import given
from hypothesis import strategies as st

from coordinator.sim.run.loop import LAST, LATE, URGENT, Loop

INSTANTS_S = st.lists(st.integers(0, 5).map(float), max_size=8)
Plan = Callable[[Loop, list[tuple[float, Callable[[], None]]]], None]


def one_by_one(loop: Loop, calls: list[tuple[float, Callable[[], None]]]) -> None:
    """Each call by itself."""
    for when_s, call in calls:
        loop.at(when_s, call)


def log_of(plan: Plan, before: list[float], planned: list[float], after: list[float]) -> list[str]:
    """What runs when: calls made before, those that are planned, and those made after them, each
    of which makes another one for the same instant and one for the next."""
    loop, log = Loop(), list[str]()

    def run(what: str) -> None:
        log.append(f"{loop.now_s} {what}")
        if what[0] != "+":
            loop.after(0.0, partial(run, f"+{what}"))
            loop.after(1.0, partial(run, f"+{what} later"))

    for number, when_s in enumerate(before):
        loop.at(when_s, partial(run, f"before {number}"))
    plan(loop, [(when_s, partial(run, f"planned {n}")) for n, when_s in enumerate(planned)])
    for number, when_s in enumerate(after):
        loop.at(when_s, partial(run, f"after {number}"), priority=(URGENT, LATE, LAST)[number % 3])
    loop.run()
    return log


@given(before=INSTANTS_S, planned=INSTANTS_S, after=INSTANTS_S)
def test_planned_calls_run_as_if_each_had_been_made_by_itself(
    before: list[float], planned: list[float], after: list[float]
) -> None:
    """Also among others of their instant, whose order their number decides."""
    assert log_of(Loop.plan, before, planned, after) == log_of(one_by_one, before, planned, after)


def test_a_call_planned_for_the_past_runs_now() -> None:
    """Time does not go back."""
    loop, log = Loop(), list[float]()
    loop.run(7.0)
    loop.plan([(3.0, lambda: log.append(loop.now_s))])
    loop.run()
    assert log == [7.0]


def test_steps_end_where_nothing_is_left_or_as_they_are_halted() -> None:
    """They say how many calls they ran; what is left stays, and `run` goes on with it."""
    loop, log = Loop(), list[int]()

    def run(number: int) -> None:
        log.append(number)
        loop.is_halted = number == 3

    for number in range(6):
        loop.at(float(number), partial(run, number))
    assert (loop.steps(2), loop.steps(2), loop.steps(2)) == (2, 2, 0)
    loop.run(4.0)
    assert log == [0, 1, 2, 3, 4]
    assert (loop.steps(9), loop.steps(9)) == (1, 0)
