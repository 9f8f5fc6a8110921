"""What the paper compares with: careless reclaims, opportunistic guests, naive placement; knobs."""

from __future__ import annotations

import pytest
from msgspec.structs import replace

from common.errors import ConfigError
from common.model import JobId, NodeName, NodeRole, WorkerRange
from coordinator.policies.aryl.reclaim.occupancy import Occupancy
from coordinator.policies.aryl.reclaim.rules import (
    ReclaimRule,
    choose_at_random,
    choose_fewest_jobs,
    jobs_on,
)
from coordinator.policies.aryl.rules import Lending, Rules, Scaling
from coordinator.policies.contract.decisions import Start
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, NodeView
from coordinator.policies.registry import KNOBS, policy
from tests.harness.builders import (
    job_with,
    make_cluster,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.tables import each_row

# Figure 5 of Lyra, EuroSys'23: GPUs per job on each of six nodes of 8.
FIGURE_5: dict[str, dict[str, int]] = {
    "s1": {"a": 6},
    "s2": {"a": 6},
    "s3": {"b": 8},
    "s4": {"c": 8},
    "s5": {"c": 2, "d": 2},
    "s6": {"d": 8},
}


def occupied() -> tuple[Occupancy, list[NodeView]]:
    """The six nodes of figure 5, all lent."""
    nodes, jobs = make_cluster(FIGURE_5)
    return Occupancy(make_snapshot(nodes=nodes, jobs=jobs)), nodes


# --- reclaims -----------------------------------------------------------------------------------


def test_fewest_jobs_first_counts_jobs_and_nothing_else() -> None:
    """Five nodes have one job: ties go by name, and job c is stopped for one node of its two."""
    occupancy, nodes = occupied()
    assert [jobs_on(occupancy, node.name) for node in nodes] == [1, 1, 1, 1, 2, 1]
    choice = choose_fewest_jobs(occupancy, nodes, 4)
    assert choice.nodes == ("s1", "s2", "s3", "s4")
    assert choice.victims == ("a", "b", "c")
    assert "s5" not in choose_fewest_jobs(occupancy, nodes, 5).nodes


def test_random_reclaims_differ_by_instant_and_repeat_by_it() -> None:
    """Whatever the instant, the same one gives the same nodes; many instants give every node."""
    occupancy, nodes = occupied()
    drawn = [choose_at_random(float(at_s))(occupancy, nodes, 1) for at_s in range(100)]
    again = [choose_at_random(float(at_s))(occupancy, nodes, 1) for at_s in range(100)]
    assert drawn == again
    counts = {node.name: sum(node.name in choice.nodes for choice in drawn) for node in nodes}
    assert min(counts.values()) >= 6  # 100 fair draws of six stay above it with 99.9 %


@each_row("wanted", range(7))
def test_a_careless_reclaim_stops_all_that_is_on_its_nodes(wanted: int) -> None:
    """Exactly as many nodes as wanted; exactly the jobs with base workers there."""
    occupancy, nodes = occupied()
    for choose in (choose_fewest_jobs, choose_at_random(7.0)):
        choice = choose(occupancy, nodes, wanted)
        assert len(choice.nodes) == wanted
        on_them = {job for name in choice.nodes for job in FIGURE_5[name]}
        assert set(choice.victims) == on_them


# --- guests of the inference cluster ------------------------------------------------------------


def two_pools(jobs: list[JobView], *, is_lent: bool) -> ClusterSnapshot:
    """An empty training node, and a T4 node that is lent or serves."""
    training = make_node_view("t", gpu_type="V100")
    role = NodeRole.ON_LOAN if is_lent else NodeRole.SERVING
    lent = make_node_view("i", gpu_type="T4", role=role)
    return make_snapshot(nodes=[lent, training], jobs=jobs, services=[make_service_view()])


def waiting(name: str, *types: str) -> JobView:
    """One worker of 4 GPUs that waits."""
    return make_job_view(name, gpus_per_worker=4, types=types)


def starts(name: str, snapshot: ClusterSnapshot) -> dict[JobId, str]:
    """Who starts on which type."""
    decisions = policy(name).allocate(snapshot, b"").decisions
    return {d.job_id: d.gpu_type for d in decisions if isinstance(d, Start)}


def test_an_opportunistic_guest_waits_for_the_inference_cluster() -> None:
    """A job for both types goes to lent nodes only, though training has room; others stay there."""
    jobs = [waiting("both", "V100", "T4"), waiting("plain", "V100")]
    assert starts("opportunistic", two_pools(jobs, is_lent=True)) == {"both": "T4", "plain": "V100"}
    assert starts("opportunistic", two_pools(jobs, is_lent=False)) == {"plain": "V100"}
    assert starts("aryl-loan", two_pools(jobs, is_lent=True)) == {"both": "V100", "plain": "V100"}


def test_a_guest_that_was_preempted_waits_no_longer_for_a_loan() -> None:
    """What is longer than any loan would never end there: it starts in training."""
    job = job_with(waiting("both", "V100", "T4"), preemptions_count=1)
    assert starts("opportunistic", two_pools([job], is_lent=False)) == {"both": "V100"}


# --- placement ----------------------------------------------------------------------------------


def test_elastic_jobs_can_prefer_the_types_of_lent_nodes() -> None:
    """The paper's rule, and for elastic jobs only; by default all prefer their own order."""
    elastic = make_job_view("e", workers=(1, 2), gpus_per_worker=1, types=("V100", "T4"))
    both = two_pools([elastic, waiting("fixed", "V100", "T4")], is_lent=True)
    favored = "aryl-loan:elastic_base_prefers_loan=true"
    assert starts("aryl-loan", both) == {"e": "V100", "fixed": "V100"}
    assert starts(favored, both) == {"e": "T4", "fixed": "V100"}


def test_naive_placement_mixes_base_and_flexible_workers() -> None:
    """With groups a flexible worker opens an empty lent node; without, it joins the base gang's."""
    nodes, [job] = make_cluster({"n1": {"base": 4}})
    nodes.append(make_node_view("n2", role=NodeRole.ON_LOAN))
    growing = replace(job, workers=WorkerRange(min=1, max=2), is_resizable=True, gpu_type="H100")
    snapshot = make_snapshot(nodes=nodes, jobs=[growing], services=[make_service_view()])
    found = {
        text: [
            placement.node
            for decision in policy(text).allocate(snapshot, b"").decisions
            for placement in getattr(decision, "added", ())
        ]
        for text in ("aryl", "aryl:separates_groups=false")
    }
    assert found == {"aryl": [NodeName("n2")], "aryl:separates_groups=false": [NodeName("n1")]}


# --- knobs --------------------------------------------------------------------------------------


def test_knobs_change_what_they_say_and_nothing_else() -> None:
    """The text is the name of the policy that it makes; the table keeps its own."""
    text = "aryl:reclaim=random:resize_cost_s=0:lend_only_on_demand=false"
    turned, plain = policy(text), policy("aryl")
    assert turned.name == text
    assert isinstance(plain.knobs, Rules)
    assert turned.knobs == replace(
        plain.knobs,
        scaling=Scaling(resize_cost_s=0.0),
        lending=Lending(reclaim=ReclaimRule.RANDOM, only_on_demand=False),
    )
    assert policy("aryl").knobs is plain.knobs


@each_row(
    ("text", "said"),
    [
        ("aryl:speed=1", "'speed=1' sets no knob; expected KNOB=VALUE with one of .*reclaim"),
        ("aryl:is_loaning", "'is_loaning' sets no knob"),
        ("aryl:order=x", "'order=x' sets no knob"),
        ("aryl:resize_cost_s=fast", "resize_cost_s=fast: expected a number"),
        ("aryl:resize_cost_s=-1", "resize_cost_s=-1: Expected `float` >= 0"),
        ("aryl:resize_cost_s=nan", "resize_cost_s=nan: "),
        ("aryl:reclaim=kind", "reclaim=kind: Invalid enum value"),
        ("srtf:is_scaling=true", "policy: srtf has no knobs"),
    ],
)
def test_a_wrong_knob_is_a_clear_error(text: str, said: str) -> None:
    """It names policy, knob and value, and what there is instead."""
    with pytest.raises(ConfigError, match=said):
        policy(text)


def test_all_knobs_are_plain_values() -> None:
    """What can be turned can be written; the order is a name's own."""
    assert "order" not in KNOBS
    assert {"reclaim", "resize_cost_s", "is_loaning", "is_scaling"} <= KNOBS.keys()
