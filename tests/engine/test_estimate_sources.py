"""What the engine says of where an estimate comes from is what policies read there."""

from __future__ import annotations

from msgspec.structs import replace

from common.model import JobSpec, JobState
from coordinator.engine.jobs import estimates
from coordinator.engine.state.settings import EngineSettings
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.aryl.reclaim.preemption_cost import LEAST_WAIT_S, Costs
from coordinator.policies.contract.estimates import LATE_RATIOS, Source, late_ratio
from tests.builders import make_job_view, make_snapshot, make_spec, make_worker_view
from tests.tables import each_row


def spec(*, expected_runtime_s: float | None = None) -> JobSpec:
    """A job of one GPU."""
    return make_spec(expected_runtime_s=expected_runtime_s)


def test_what_the_engine_writes_is_known_to_policies() -> None:
    """The history of like jobs and what was declared may be trusted; a size's median and the
    default are guesses."""
    settings, told, short = EngineSettings(), spec(expected_runtime_s=60.0), spec()
    nothing, history, size = ClusterState(), ClusterState(), ClusterState()
    history.history[estimates.history_key("t", told)] = [50.0, 70.0]
    size.history[estimates.size_class(short)] = [50.0, 70.0, 90.0]
    written = {
        Source.HISTORY: estimates.whole_work(history, settings, "t", told)[1],
        Source.DECLARED: estimates.whole_work(nothing, settings, "t", told)[1],
        Source.SIZE: estimates.whole_work(size, settings, "t", short)[1],
        Source.DEFAULT: estimates.whole_work(nothing, settings, "t", short)[1],
    }
    assert written[Source.HISTORY] == "history of 2 runs"
    for source, text in written.items():
        assert text.startswith(source)
        assert late_ratio(text) == LATE_RATIOS.get(source)


@each_row(
    ("source", "latest_s"),
    [
        ("live progress", 125.0),
        ("length of its pre-run", 100.0),
        ("progress of an earlier attempt", 150.0),
        ("declared", 150.0),
        ("history of 5 runs", 200.0),
        ("median of 4 jobs of this size", None),
        ("an earlier attempt that outlived the estimate (history of 5 runs)", None),
        ("recovered from a node's ledger", None),
        ("default", None),
        ("words of nobody", None),
        ("", None),
    ],
)
def test_a_running_job_is_waited_for_by_the_source_of_its_estimate(
    source: str, latest_s: float | None
) -> None:
    """Of 100 s left by each source a reclaim allows for so many; it waits for no guess."""
    worker = make_worker_view("job", 0, "n1", gpus=1)
    job = make_job_view("job", state=JobState.RUNNING, remaining_work_s=100.0, placed=[worker])
    job = replace(job, estimate_source=source)
    costs = Costs(make_snapshot(nodes=[], jobs=[job]))
    assert costs.ends_within_s(job.job_id) == latest_s
    assert latest_s is None or latest_s > LEAST_WAIT_S
