"""Tiresias: its vectors, its placing, what it learns and its knobs."""

from __future__ import annotations

from collections.abc import Mapping

import msgspec
import pytest

from common.errors import ConfigError
from common.profile import JobProfile
from coordinator.policies.contract.decisions import Preempt, Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.registry import policy
from coordinator.policies.schedulers.tiresias.policy import Memory, TiresiasKnobs
from tests.harness.builders import NOW_S, job_with
from tests.harness.served import cell, changed
from tests.harness.served import served_job as job
from tests.tables import each_row

UNIT_S = 100.0
"""One tick of the paper's examples."""


# --- the paper's examples -----------------------------------------------------------------------


def mean_ticks(name: str, jobs: Mapping[str, tuple[int, int]], gpus: int) -> float:
    """The mean completion of jobs (GPUs, ticks) that all come at 0, with a pass at each tick."""
    made, memory = policy(name), b""
    ran, first = dict.fromkeys(jobs, 0), dict[str, float]()
    running, ended = set[str](), dict[str, int]()
    tick = 0
    while len(ended) < len(jobs):
        now_s = NOW_S + tick * UNIT_S
        views: list[JobView] = []
        for each, (width, length) in jobs.items():
            if each in ended:
                continue
            view = job(
                each,
                width,
                node="n0" if each in running else None,
                served=ran[each] * width * UNIT_S,
                first_s=first.get(each),
                waits_since_s=now_s,
            )
            left_s = (length - ran[each]) * UNIT_S
            views.append(job_with(view, as_of_s=now_s, remaining_work_s=left_s))
        allocation = made.allocate(cell(views, now_s=now_s, n0=gpus), memory)
        memory = allocation.memory
        running -= {d.job_id for d in allocation.decisions if isinstance(d, Preempt)}
        running |= {d.job_id for d in allocation.decisions if isinstance(d, Start)}
        tick += 1
        for each in running:
            first.setdefault(each, now_s)
            ran[each] += 1
            if ran[each] == jobs[each][1]:
                ended[each] = tick
        running -= ended.keys()
    return sum(ended.values()) / len(ended)


EXAMPLE = {"j1": (2, 2), "j2": (1, 8), "j3": (2, 6)}
EVERY_UNIT = "/".join(str(round(UNIT_S) * units) for units in range(1, 17))


@pytest.mark.parametrize(
    ("name", "mean"),
    [
        ("srsf", 28 / 3),
        (f"tiresias:line=first-start:limits={EVERY_UNIT}", 35 / 3),
        ("tiresias-gittins:limits=99999:services=400/800/1200", 28 / 3),
    ],
)
def test_the_papers_example_comes_out(name: str, mean: float) -> None:
    """Two GPUs, three jobs: 9.33 ticks by SRSF, 11.67 by 2D-LAS, 9.33 by the sup of Gittins."""
    assert mean_ticks(name, EXAMPLE, gpus=2) == pytest.approx(mean)


# --- placing ------------------------------------------------------------------------------------

SKEWED, EVEN = JobProfile(model="vgg16", skew_ratio=0.743), JobProfile(skew_ratio=0.092)


def nodes_of(snapshot: ClusterSnapshot, name: str, memory: bytes = b"") -> list[str]:
    """Where the only start of a pass goes; nowhere."""
    starts = [
        decision
        for decision in policy(name).allocate(snapshot, memory).decisions
        if isinstance(decision, Start)
    ]
    return [placement.node for start in starts for placement in start.placements]


def fragmented(wide: JobView, **jobs: str) -> ClusterSnapshot:
    """Two nodes of four GPUs, two of each held by a job of the first queue."""
    held = [job(name, 2, node=node, served=1.0, first_s=0.0) for name, node in jobs.items()]
    return cell([wide, *held], n0=4, n1=4)


def test_skewed_models_wait_for_the_fewest_nodes() -> None:
    """Above the pack limit a gang that one node could hold is not spread; at and below it is."""
    for profile, nodes in ((SKEWED, []), (EVEN, ["n0", "n1"]), (JobProfile(), ["n0", "n1"])):
        wide = job("wide", 1, workers=4, profile=profile)
        assert nodes_of(fragmented(wide, a="n0", b="n1"), "tiresias") == nodes
    wide = job("wide", 1, workers=4, profile=SKEWED)
    assert nodes_of(fragmented(wide, a="n0", b="n1"), "tiresias:pack_limit=0.8") == ["n0", "n1"]
    at_it = fragmented(wide, a="n0", b="n1"), "tiresias:pack_limit=0.743"
    assert nodes_of(*at_it) == ["n0", "n1"]
    assert nodes_of(fragmented(wide, a="n0"), "tiresias") == ["n1"]


def test_a_gang_that_no_node_could_hold_takes_as_few_as_the_cell_allows() -> None:
    """Six workers need two nodes of four: two will do, three will not."""
    wide = job("wide", 1, workers=6, profile=SKEWED)
    assert nodes_of(cell([wide], n0=4, n1=4, n2=4), "tiresias") == ["n0", "n1"]
    held = [job(name, 2, node=name, served=1.0, first_s=0.0) for name in ("n0", "n1", "n2")]
    assert nodes_of(cell([wide, *held], n0=4, n1=4, n2=4), "tiresias") == []


def test_what_one_job_tells_of_its_model_counts_for_others() -> None:
    """A job that does not tell its skew is taken for its model, also after who told it left."""
    made = policy("tiresias")
    told = job("told", 1, profile=SKEWED)
    memory = made.allocate(cell([told], n0=4), b"").memory
    wide = job("wide", 1, workers=4, profile=JobProfile(model="vgg16"))
    snapshot = fragmented(wide, a="n0", b="n1")
    assert nodes_of(snapshot, "tiresias", memory) == []
    assert nodes_of(snapshot, "tiresias") == ["n0", "n1"]
    [hold] = made.pending_reasons(snapshot, memory)
    assert "on the fewest nodes" in hold.blockers[0]


# --- what is learned ----------------------------------------------------------------------------


def test_gittins_learns_the_service_of_jobs_that_left() -> None:
    """A job that is gone had what it would have by now, running or not; who never ran had none."""
    made = policy("tiresias-gittins:history=2")
    jobs = [
        job("runs", 4, node="n0", served=1000.0, first_s=0.0),
        job("waits", 8, served=500.0, first_s=0.0),
        job("new", 8, submitted_at_s=5.0),
    ]
    memory = made.allocate(cell(jobs, n0=4), b"").memory
    later = cell(jobs[1:], n0=4, now_s=NOW_S + 50.0)
    memory = made.allocate(later, memory).memory
    assert msgspec.msgpack.decode(memory, type=Memory).served == (1200.0,)
    memory = made.allocate(cell([], n0=4, now_s=NOW_S + 60.0), memory).memory
    assert msgspec.msgpack.decode(memory, type=Memory).served == (1200.0, 500.0)


def test_gittins_orders_a_queue_by_what_is_likely_to_end() -> None:
    """Where jobs end at 100 or at 3000 GPU-s, one with 2900 comes before a new one, one with 200
    after it; without a history the first start counts."""
    knobs = "tiresias-gittins:services=100/100/3000"
    close, new = job("close", 8, served=2900.0, first_s=9.0), job("new", 8)
    far = job("far", 8, served=200.0, first_s=1.0)
    assert changed(cell([close, new, far], n0=8), knobs) == ([], ["close"])
    assert changed(cell([new, far], n0=8), knobs) == ([], ["new"])
    assert changed(cell([close, new, far], n0=8), "tiresias-gittins") == ([], ["far"])


def test_a_return_to_the_first_queue_does_not_make_a_job_younger() -> None:
    """Its index is by all that it attained: 100 GPU-s may end it, whoever else is in that queue."""
    knobs = "tiresias-gittins:services=100/100/3000:limits=50:promote=1"
    back = job("back", 8, served=2900.0, first_s=9.0, waits_since_s=NOW_S - 400.0)
    young = job("young", 8, served=20.0, first_s=1.0, waits_since_s=NOW_S)
    assert changed(cell([back, young], n0=8), knobs) == ([], ["back"])


def test_the_last_queue_is_by_first_start() -> None:
    """Beyond the last limit the index does not count."""
    knobs = "tiresias-gittins:services=100/100/3000/90000:limits=50"
    close, far = (
        job("close", 8, served=89_999.0, first_s=9.0),
        job("far", 8, served=200.0, first_s=1.0),
    )
    assert changed(cell([close, far], n0=8), knobs) == ([], ["far"])


# --- knobs --------------------------------------------------------------------------------------


@each_row(
    ("text", "said"),
    [
        ("tiresias:limits=7200/3600", "ascend"),
        ("tiresias:limits=0", "> 0"),
        ("tiresias:limits=a/b", "limits=a/b"),
        ("tiresias:promote=0", "promote"),
        ("tiresias:mixes_units=true", "line=entry"),
        ("tiresias-gittins:services=5/0", "services"),
        ("tiresias:services=5", "sets no knob"),
        ("tiresias:line=random", "first-start"),
    ],
)
def test_knobs_that_make_no_sense_are_refused(text: str, said: str) -> None:
    """The error names the policy, the knob and what was expected."""
    with pytest.raises(ConfigError, match=f"^policy {text.partition(':')[0]}: .*{said}"):
        policy(text)


def test_a_list_is_written_with_slashes() -> None:
    """`limits=3600/14400` are three queues, `limits=` is one."""
    knobs = policy("tiresias:limits=3600/14400:promote=null").knobs
    assert knobs == TiresiasKnobs(limits=(3600.0, 14400.0))
    assert policy("tiresias:limits=").knobs == TiresiasKnobs(limits=())


def test_bytes_that_do_not_decode_are_forgotten() -> None:
    """Memory that does not decode costs what was learned, not the pass."""
    snapshot = cell([job("new", 8)], n0=8)
    assert changed(snapshot, "tiresias", b"\xc1") == ([], ["new"])
