"""What is looked up on nodes is of the attempt and the service that is asked for, and no other."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.model import Pool, ServiceName
from coordinator.engine.state.events import LoadMeasured
from tests.engine.house import CHAT, House
from tests.engine.scripted_nodes import CODE, Reporting, service


@pytest.mark.parametrize("is_present", [True, False])
def test_workers_of_a_node_are_those_of_present_attempts(*, is_present: bool) -> None:
    """A key that an earlier attempt left on a GPU is of nobody, though a worker of the same number
    runs elsewhere."""
    house = House()
    job = house.submit()
    house.start(job, "t1")
    house.wait(5.0)
    [worker] = job.workers.values()
    assert house.workers_on(worker.node) == [(job, worker)]
    left = replace(worker.key, attempt=job.attempt.number - (0 if is_present else 1))
    house.node("t0").gpus[0].holder = left
    assert house.workers_on(house.node("t0").name) == ([(job, worker)] if is_present else [])


@pytest.mark.parametrize(("asked", "is_short"), [(CHAT, True), (CODE, False)])
def test_a_service_that_lends_nothing_can_take_nothing_back(
    asked: ServiceName, *, is_short: bool
) -> None:
    """More load than its nodes carry asks for a loan pass where one of them is lent, and not where
    another service's is."""
    cell = Reporting(Pool.INFERENCE, service(), service(CODE))
    cell.submit("j")
    cell.lend()
    outcome = cell.handle(LoadMeasured(service=asked, load=1000.0))
    assert outcome.needs_loan_pass is is_short
