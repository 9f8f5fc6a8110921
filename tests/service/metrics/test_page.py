"""What a coordinator's page says of a cell, on virtual time."""

from __future__ import annotations

from msgspec.structs import replace

from common.api import Operate, Requeue
from common.model import NodeName, NodeRole
from common.monitoring.page import renderer
from coordinator.service.coordinator import Coordinator
from coordinator.service.metrics.page import make_registry
from coordinator.service.metrics.table import CELL, FAMILIES
from tests.harness.cluster.coordinator import CHAT, Cell, on_loan, running, submit


class Page:
    """A coordinator's page."""

    def __init__(self, coordinator: Coordinator) -> None:
        self._render = renderer(make_registry(coordinator))

    def read(self) -> dict[str, float]:
        """Every sample, by its name with labels."""
        text = self._render("")[0].decode()
        lines = [line for line in text.splitlines() if line.startswith("aryl_")]
        return {name: float(value) for name, _, value in (one.rpartition(" ") for one in lines)}


def total(samples: dict[str, float], name: str) -> float:
    """The sum of a metric over its labels."""
    return sum(value for one, value in samples.items() if one.partition("{")[0] == name)


async def test_a_standby_shows_itself_alone() -> None:
    """Its engine is empty, and 0 jobs would be no truth; it hears reports all the same."""
    async with Cell(training=1) as cell:
        await cell.lead("one")
        standby = cell.launch("two").coordinator
        page = Page(standby)
        await cell.until(lambda: page.read()["aryl_reports_total"] > 0)
        samples = page.read()
        assert samples["aryl_leader"] == 0.0
        shown = {name.partition("{")[0] for name in samples}
        assert shown & {one.name for one in CELL} == set()


async def test_a_loan_and_its_reclaim_are_counted_once_with_all_their_stages() -> None:
    """The sums of the page are those of the engine, and what is known when a leader begins is not
    counted again."""
    async with Cell(training=1, inference=2) as cell:
        coordinator = await cell.lead()
        page = Page(coordinator)
        assert total(page.read(), "aryl_returns_total") == 0.0
        await on_loan(cell, coordinator)
        lent = page.read()
        assert lent[f'aryl_loans_open{{service="{CHAT}",state="on_loan"}}'] == 1.0
        assert lent[f'aryl_lent_gpus{{service="{CHAT}"}}'] == 8.0
        assert lent['aryl_gpus{holder="job",pool="inference",type="H100"}'] == 8.0
        assert total(lent, "aryl_gpus") == 24.0
        assert total(lent, "aryl_jobs") == 2.0
        assert lent['aryl_job_queueing_seconds_count{tenant="team"}'] == 2.0
        await cell.ask(Operate(action="recall", target=CHAT, reason="test"), tenant="ops")
        nodes = coordinator.engine.state.nodes
        inference = [NodeName("i0"), NodeName("i1")]
        await cell.until(lambda: all(nodes[n].role == NodeRole.SERVING for n in inference))
        await cell.until(lambda: coordinator.engine.state.counters.preemption_cost_gpu_s > 0)
        samples, counters = page.read(), coordinator.engine.state.counters
        kept = f'aryl_returns_total{{kind="reclaim",outcome="in_time",service="{CHAT}"}}'
        assert (samples[kept], total(samples, "aryl_returns_total")) == (1.0, 1.0)
        (loan,) = coordinator.engine.state.loans.values()
        for stage, took_s in loan.stage_durations_s.items():
            labels = f'{{service="{CHAT}",stage="{stage}"}}'
            assert samples[f"aryl_reclaim_stage_seconds_sum{labels}"] == took_s
        assert samples['aryl_preemptions_total{cause="reclaim"}'] == counters.preemptions == 1
        lost = samples['aryl_lost_gpu_seconds_total{cause="reclaim"}']
        assert (
            lost == counters.preemption_cost_gpu_s == total(samples, "aryl_lost_gpu_seconds_total")
        )
        assert samples['aryl_decisions_total{kind="loan"}'] == 1.0
        assert samples["aryl_journal_records_total"] == len(cell.records)
        assert samples["aryl_journal_bytes_total"] == sum(map(len, cell.records))
        records = len(cell.records)
        await submit(cell, "more")
        await cell.until(lambda: len(cell.records) > records + 1)
        assert total(page.read(), "aryl_returns_total") == 1.0

        await cell.leaders[0].crash()
        later = Page(await cell.lead("two")).read()
        assert total(later, "aryl_returns_total") == 0.0
        assert total(later, "aryl_preemptions_total") == 0.0
        assert later["aryl_loans_total"] == 1.0


async def test_a_requeue_counts_as_a_preemption_by_an_order() -> None:
    """Not as one by its node, and its unsaved work is lost by the same cause."""
    async with Cell(training=1) as cell:
        coordinator = await cell.lead()
        await running(cell, coordinator)
        page = Page(coordinator)
        page.read()
        [job_id] = coordinator.engine.state.live_jobs
        await cell.ask(Requeue(job_ids=(job_id,), is_held=True))
        await cell.until(lambda: coordinator.engine.state.jobs[job_id].loss is not None)
        await cell.until(lambda: not coordinator.engine.state.jobs[job_id].workers)
        samples = page.read()
        assert samples['aryl_preemptions_total{cause="order"}'] == 1.0
        assert total(samples, "aryl_preemptions_total") == 1.0
        lost = samples['aryl_lost_gpu_seconds_total{cause="order"}']
        assert lost == coordinator.engine.state.counters.preemption_cost_gpu_s > 0.0
        assert samples['aryl_tenant_waiting_gpus{tenant="team"}'] == 0.0


async def test_an_unknown_load_is_no_zero() -> None:
    """Without a page the load has no sample, and the metric beside it says that it is unknown."""
    async with Cell(inference=1) as cell:
        coordinator = await cell.lead()
        page = Page(coordinator)
        known, load = (
            f'aryl_service_{what}{{service="{CHAT}"}}'
            for what in ("load_known", "load_requests_per_second")
        )
        await cell.until(lambda: page.read()[known] == 1.0)
        assert page.read()[load] == 0.0
        cell.agents["i0"].page_error = "connection refused"
        await cell.until(lambda: page.read()[known] == 0.0)
        assert load not in page.read()


async def test_tenants_beyond_the_most_share_their_series() -> None:
    """However many tenants submit, the page has a bounded number of series."""
    async with Cell(training=1) as cell:
        coordinator = await cell.lead()
        await running(cell, coordinator)
        page = Page(coordinator)
        one = next(iter(coordinator.engine.state.jobs.values()))
        for number in range(300):
            name = f"x{number:03}"
            copy = type(one)(
                job_id=type(one.job_id)(name), spec=one.spec, tenant=name, user="u",
                submitted_at_s=0.0, wait=type(one.wait)(pending_since_s=0.0),
            )  # fmt: skip
            coordinator.engine.state.jobs[copy.job_id] = copy
            coordinator.engine.state.live_jobs[copy.job_id] = None
            copy.attempt.ran_at_s = 1.0
            line = coordinator.engine.state.stories[-1]
            coordinator.engine.state.stories.append(replace(line, subject=copy.job_id))
        samples = page.read()
        tenants = [name for name in samples if name.startswith("aryl_tenant_gpus{")]
        assert len(tenants) == 201
        assert samples['aryl_jobs{state="pending",tenant="(others)"}'] == 101.0
        assert total(samples, "aryl_jobs") == 301.0
        await submit(cell, "more")
        await cell.until(lambda: total(page.read(), "aryl_job_queueing_seconds_count") > 300)
        waits = [name for name in page.read() if name.startswith("aryl_job_queueing_seconds_count")]
        assert len(waits) == 201


async def test_a_start_that_turns_out_to_be_earlier_is_no_second_wait() -> None:
    """As of a gang that is rebuilt from ledgers, node by node."""
    async with Cell(training=1) as cell:
        coordinator = await cell.lead()
        job_id = await running(cell, coordinator)
        page = Page(coordinator)
        before = total(page.read(), "aryl_job_queueing_seconds_count")
        state = coordinator.engine.state
        attempt = state.jobs[job_id].attempt
        assert attempt.ran_at_s is not None
        attempt.ran_at_s -= 1.0
        state.stories.append(replace(state.stories[-1], subject=job_id))
        await submit(cell, "more")
        assert total(page.read(), "aryl_job_queueing_seconds_count") == before


def test_every_metric_is_in_one_table() -> None:
    """A name that two tables had would be one metric with two meanings."""
    assert len({one.name for one in FAMILIES}) == len(FAMILIES)
