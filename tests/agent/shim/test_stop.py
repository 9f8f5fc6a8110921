"""The stop protocol without a process: who is asked, who is signalled, who is killed, and when."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from agent.shim.stop import ANSWER_S, RELEASE_S, SAVING_REASONS, StopProtocol
from common.model import StopReason
from tests.tables import each_row


def stop(*, is_connected: bool, reason: str = "preempt", grace_s: float = 60.0) -> StopProtocol:
    """A stop that begins at 100 s."""
    return StopProtocol(reason, grace_s, 100.0, is_connected=is_connected)


def test_a_job_that_is_not_connected_is_signalled_at_once() -> None:
    """Its signal is all that such a job understands."""
    protocol = stop(is_connected=False)
    assert protocol.due(100.0) == ["signal"]
    assert protocol.stage == "signalled"
    assert protocol.due_at_s() == 160.0
    assert protocol.due(160.0) == ["kill"]
    assert protocol.due_at_s() == float("inf")


def test_a_connected_job_is_asked_and_signalled_only_when_silent() -> None:
    """A request comes first; silence is answered with the signal."""
    protocol = stop(is_connected=True)
    assert protocol.due(100.0) == ["request"]
    assert protocol.due(100.0 + ANSWER_S - 0.1) == []
    assert protocol.due(100.0 + ANSWER_S) == ["signal"]


def test_a_job_that_works_is_never_signalled() -> None:
    """The signal could end the very save that the grace is for."""
    protocol = stop(is_connected=True)
    protocol.due(100.0)
    protocol.on_working(101.0)
    assert protocol.due(159.9) == []
    assert protocol.due(160.0) == ["kill"]
    assert protocol.stages == {"requested": 0.0, "working": 1.0, "killed": 60.0}


def test_a_job_that_saved_is_told_to_leave_then_signalled() -> None:
    """Saved work ends the patience: the node is wanted back."""
    protocol = stop(is_connected=True)
    protocol.due(100.0)
    protocol.on_working(101.0)
    protocol.on_saved(110.0)
    assert protocol.due(110.0) == ["stop"]
    protocol.on_released(111.0)
    assert protocol.due(111.0 + RELEASE_S - 0.1) == []
    assert protocol.due(111.0 + RELEASE_S) == ["signal"]
    assert protocol.stage == "released"


@each_row("reason", sorted(set(StopReason) - SAVING_REASONS))
def test_a_job_whose_work_is_over_is_not_asked_to_save(reason: str) -> None:
    """A cancelled, finished or stale worker is told and signalled at once."""
    assert stop(is_connected=True, reason=reason).due(100.0) == ["stop", "signal"]


def test_every_saving_reason_is_a_stop_reason() -> None:
    """The shim's own words are those of the model."""
    assert set(StopReason) > SAVING_REASONS


def test_a_job_that_connects_late_is_asked_as_well() -> None:
    """Its signal has gone out; it may still save by the protocol."""
    protocol = stop(is_connected=False)
    protocol.due(100.0)
    protocol.on_connected(101.0)
    assert protocol.due(101.0) == ["request"]
    protocol.on_saved(105.0)
    assert protocol.stage == "saved"


def test_a_job_that_hangs_up_while_it_works_gets_its_signal() -> None:
    """Who hung up cannot say saved any more."""
    protocol = stop(is_connected=True)
    protocol.due(100.0)
    protocol.on_working(101.0)
    protocol.on_disconnected(110.0)
    assert protocol.due(110.0 + ANSWER_S) == ["signal"]


def test_the_earliest_end_of_several_orders_counts() -> None:
    """A later order may shorten a grace and never prolongs it."""
    protocol = stop(is_connected=False)
    protocol.due(100.0)
    protocol.shorten(600.0, 101.0)
    assert protocol.deadline_s == 160.0
    protocol.shorten(5.0, 102.0)
    assert protocol.due(107.0) == ["kill"]


def test_no_grace_kills_at_once() -> None:
    """Zero is a grace like any other."""
    assert stop(is_connected=True, grace_s=0.0).due(100.0)[-1] == "kill"


CALLS = st.sampled_from(["connected", "disconnected", "working", "saved", "released", "pass"])


@given(
    st.booleans(),
    st.sampled_from(sorted(StopReason)),
    st.floats(min_value=0.0, max_value=100.0),
    st.lists(st.tuples(CALLS, st.floats(min_value=0.0, max_value=30.0))),
)
def test_whatever_a_job_says_it_is_killed_once_at_its_deadline(
    is_connected: bool, reason: str, grace_s: float, calls: list[tuple[str, float]]
) -> None:
    """No conversation prolongs a grace, no worker is signalled twice, and none is killed early."""
    protocol = stop(is_connected=is_connected, reason=reason, grace_s=grace_s)
    now_s, said = 100.0, []
    for name, pause_s in [*calls, ("pass", 1000.0)]:
        while protocol.due_at_s() <= now_s + pause_s:
            at_s = max(now_s, protocol.due_at_s())
            said += [(action, at_s) for action in protocol.due(at_s)]
        now_s += pause_s
        if name != "pass":
            getattr(protocol, f"on_{name}")(now_s)
    kills = [at_s for action, at_s in said if action == "kill"]
    assert kills == [100.0 + grace_s]
    assert sum(action == "signal" for action, _ in said) <= 1
