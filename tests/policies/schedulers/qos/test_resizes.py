"""How often qos moves a job: `resize_every_s` bounds resizes, growth and stops for others."""

from __future__ import annotations

from msgspec import structs

from coordinator.policies.contract.decisions import Preempt, Resize, Start
from tests.builders import NOW_S
from tests.policies.schedulers.qos.test_policy import EXACT, decide, view

SHORT = f"{EXACT}:resize_every_s=5"


def test_who_was_just_resized_does_not_grow_onto_idle_gpus() -> None:
    """Nobody waits for them; it gets them once its rest is over."""
    job = structs.replace(view("a", 8000.0, 4000.0, placed=2), last_resized_at_s=NOW_S - 10.0)
    assert decide(job) == {}
    assert isinstance(decide(job, text=SHORT)["a"], Resize)


def test_who_would_be_late_grows_however_lately_it_was_resized() -> None:
    """The rest is for what can wait; a deadline cannot."""
    late = structs.replace(view("a", 800.0, 200.0, placed=2), last_resized_at_s=NOW_S - 10.0)
    resize = decide(late, view("b", 1e6, None, workers=(4, 4)))["a"]
    assert isinstance(resize, Resize)
    assert sum(placement.worker_count for placement in resize.added) == 2


def test_who_was_just_started_is_not_stopped_for_two_others() -> None:
    """One more job would be in time without it; so soon after its start it goes on all the same."""
    wide = view("wide", 800.0, 110.0, workers=(8, 8), placed=8)
    wide = structs.replace(wide, started_at_s=NOW_S - 10.0)
    others = [view(name, 400.0, 110.0, workers=(4, 4)) for name in ("b", "c")]
    assert decide(wide, *others) == {}
    found = decide(wide, *others, text=SHORT)
    assert isinstance(found["wide"], Preempt)
    assert isinstance(found["b"], Start)
    assert isinstance(found["c"], Start)


def test_a_reason_tells_the_time_that_its_workers_take() -> None:
    """One worker would do; it goes on with the seven that a newcomer leaves, and ends sooner."""
    rich, late = view("rich", 400.0, 900.0, placed=8), view("late", 100.0, 200.0)
    resize = decide(rich, late)["rich"]
    assert resize.reason.startswith("7 workers: 57 s predicted by ")
    grown = decide(view("rich", 8000.0, 9000.0, placed=2))["rich"]
    assert grown.reason.startswith("8 workers: 1000 s predicted by ")
    assert grown.reason.endswith(", and no job waits for the rest")


def test_nor_is_who_was_just_resized() -> None:
    """A resize counts as a start does, whichever was later."""
    wide = view("wide", 800.0, 110.0, workers=(8, 8), placed=8)
    wide = structs.replace(wide, started_at_s=NOW_S - 600.0, last_resized_at_s=NOW_S - 10.0)
    others = [view(name, 400.0, 110.0, workers=(4, 4)) for name in ("b", "c")]
    assert decide(wide, *others) == {}
    assert isinstance(decide(wide, *others, text=SHORT)["wide"], Preempt)
