"""Why a node that serves is not lent: the service's balance, then every reason at once."""

from __future__ import annotations

from typing import Any

from msgspec.structs import replace

from common.model import Mode, NodeName, NodeRole, Preemptibility
from coordinator.policies.contract.decisions import Loan
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView, LoadSample
from coordinator.policies.registry import policy
from tests.harness.builders import (
    NOW_S,
    job_with,
    make_job_view,
    make_node_view,
    make_service_view,
    make_snapshot,
)
from tests.tables import each_row

WANTS = make_job_view("wants", workers=(1, 1), gpus_per_worker=8)
ELSEWHERE = job_with(WANTS, nodes_avoided=(NodeName("n1"),))


def cell(
    *,
    jobs: tuple[JobView, ...] = (WANTS,),
    is_frozen: bool = False,
    is_cordoned: bool = False,
    takes_nothing: bool = False,
    is_closing: bool = False,
    sick_gpus: int = 0,
    trespassed_gpus: int = 0,
    since_s: float = 0.0,
    **service: Any,
) -> ClusterSnapshot:
    """Three serving nodes of ten requests per second, one of them needed; n1 is looked at."""
    values: dict[str, Any] = {"load": 5.0, "hold_off_s": 60.0, **service}
    nodes = [
        replace(
            make_node_view(
                "n1",
                role=NodeRole.SERVING,
                serving_since_s=since_s,
                is_drained_by_operator=is_cordoned,
            ),
            takes_nothing=takes_nothing or is_closing,
            is_closing=is_closing,
            sick_gpus=sick_gpus,
            trespassed_gpus=trespassed_gpus,
        ),
        make_node_view("n2", role=NodeRole.SERVING, serving_since_s=since_s),
        make_node_view("n3", role=NodeRole.SERVING, serving_since_s=since_s),
        make_node_view("t1", free_gpus=0),
    ]
    return make_snapshot(
        nodes=nodes, jobs=jobs, services=[make_service_view(**values)], is_frozen=is_frozen
    )


def why(snapshot: ClusterSnapshot, name: str = "n1", *, bundle: str = "aryl") -> tuple[str, ...]:
    """What `explain node` is told, after the line with the balance."""
    balance, *reasons = policy(bundle).not_lent_reasons(snapshot, NodeName(name))
    assert balance.startswith("chat: load forecast")
    return tuple(reasons)


REASONS: dict[str, tuple[dict[str, Any], str]] = {
    "observe": (
        {"mode": Mode.OBSERVE},
        "mode observe: none of its nodes is lent; the next loan pass records the loan it would "
        "make",
    ),
    "recommend": (
        {"mode": Mode.RECOMMEND},
        "mode recommend: a loan pass recommends its loan, which waits for an operator",
    ),
    "recalled": ({"is_recalled": True}, "is recalled"),
    "frozen": ({"is_frozen": True}, "frozen"),
    "return": (
        {"return_s": 42.0, "reclaim_deadline_s": 20.0},
        "may need 42 s to return, more than the deadline of 20 s",
    ),
    "never measured": ({"load": ()}, "never measured"),
    "stale": ({"load": (LoadSample(NOW_S - 301.0, 5.0),)}, "last measured 301 s ago"),
    "min_serving": ({"min_serving": 3}, "3 ready, 3 needed (min_serving is 3)"),
    "forecast": ({"load": 29.0}, "3 ready, 3 needed (the forecast needs them)"),
    "recent peak": (
        {"load": (LoadSample(NOW_S - 60.0, 29.0), LoadSample(NOW_S, 5.0))},
        "the peak of the last 300 s counts before lending",
    ),
    "hold-off": ({"since_s": NOW_S - 20.0}, "its hold-off lasts 40 s more"),
    "cordoned": ({"is_cordoned": True}, "cordoned"),
    "window": ({"is_closing": True}, "it closes soon: its service counts it as gone already"),
    "full disk": ({"takes_nothing": True}, "it takes nothing new now"),
    "sick GPU": ({"sick_gpus": 1}, "1 of its GPUs is not well"),
    "used GPU": ({"trespassed_gpus": 2}, "2 of its GPUs are used by a process that is not its"),
    "no demand": ({"jobs": ()}, "no job that waits or could grow"),
    "wrong type": (
        {"jobs": (make_job_view("j", types=("T4",)),)},
        "none of 1 job that wants GPUs could use it",
    ),
    "grace": (
        {"jobs": (make_job_view("j", grace_s=90.0),)},
        "a grace above the 60 s that chat allows",
    ),
    "too wide": (
        {"jobs": (make_job_view("j", gpus_per_worker=16),)},
        "none of 1 job that wants GPUs could use it",
    ),
    "another node": (
        {"jobs": (ELSEWHERE,)},
        "GPU type, GPUs per worker, the nodes that they may use, or a grace",
    ),
    "not preemptible": (
        {"jobs": (make_job_view("j", preemptibility=Preemptibility.NON),)},
        "no job that waits or could grow",
    ),
}


@each_row("case", REASONS)
def test_a_reason_that_keeps_a_node_is_named_and_does_keep_it(case: str) -> None:
    """Each alone: it is the one reason given, and the loan pass indeed lends no such node."""
    values, text = REASONS[case]
    snapshot = cell(**values)
    (reason,) = why(snapshot)
    assert text in reason
    loans = [d.node for d in policy("aryl").lend(snapshot) if isinstance(d, Loan)]
    assert "n1" not in loans


def test_all_reasons_are_named_not_the_first() -> None:
    """A service in mode observe, too slow, unmeasured, and a node that rests: four sentences."""
    snapshot = cell(
        mode=Mode.OBSERVE, return_s=400.0, load=(), min_serving=3, since_s=NOW_S - 20.0, jobs=()
    )
    reasons = why(snapshot)
    for text in ("mode observe", "400 s to return", "never measured", "min_serving is 3",
                 "hold-off", "no job"):  # fmt: skip
        assert any(text in reason for reason in reasons), (text, reasons)


def test_a_node_is_told_that_others_which_came_home_keep_it() -> None:
    """As many nodes are within their hold-off as are spare: none of the others goes instead."""
    snapshot = cell(load=15.0)
    home = NOW_S - 20.0
    nodes = [
        replace(node, serving_since_s=home) if node.name == "n3" else node
        for node in snapshot.nodes
    ]
    (reason,) = why(replace(snapshot, nodes=tuple(nodes)))
    assert reason == (
        "1 of chat are spare, and 1 became ready less than 60 s ago: until their hold-off is over, "
        "no other one goes instead"
    )
    assert not policy("aryl").lend(replace(snapshot, nodes=tuple(nodes)))


def test_a_node_that_is_next_is_told_so_and_others_who_goes_first() -> None:
    """With one job of one node only one of two spare nodes is lent: the first by name."""
    assert why(cell()) == ("nothing keeps it: the next loan pass lends it",)
    assert why(cell(), "n2") == ("the demand is covered by n1",)


def test_a_mode_is_told_as_what_it_does() -> None:
    """A node that would not be lent either way is not said to be recommended or noted."""
    assert why(cell(mode=Mode.RECOMMEND, jobs=()))[0].endswith(
        "a loan of it would be recommended and wait for an operator"
    )
    assert why(cell(mode=Mode.OBSERVE, jobs=()))[0].endswith(
        "loans it would make are only recorded"
    )
    assert not any("mode" in reason for reason in why(cell(jobs=())))


def test_a_gang_that_no_loan_completes_is_told() -> None:
    """Every reason that concerns the node alone is absent, and yet it stays: two are spare, the
    gang needs three."""
    gang = make_job_view("gang", workers=(3, 3), gpus_per_worker=8)
    (reason,) = why(cell(jobs=(gang,)))
    assert "whole gang has no room even with every node that can be lent" in reason


def test_a_policy_without_loans_says_so() -> None:
    """Whoever looks for the reason in the load must not be sent there."""
    assert "the policy of this cell lends nothing" in why(cell(), bundle="sjf")
    assert "the policy of this cell lends nothing" in why(cell(), bundle="srtf")


def test_what_outlasts_all_other_reasons_is_named_last() -> None:
    """`aryl up` has room for one reason: that the policy never lends, and not what passes by."""
    reasons = why(cell(since_s=NOW_S - 1, jobs=()), bundle="sjf")
    assert len(reasons) > 2 and reasons[-1] == "the policy of this cell lends nothing"


def test_only_serving_nodes_of_a_known_service_are_explained() -> None:
    """A training node, a lent one and a stranger have no balance to tell of."""
    snapshot = make_snapshot(
        nodes=[
            make_node_view("t1"),
            make_node_view("l1", role=NodeRole.ON_LOAN),
            make_node_view("s1", role=NodeRole.SERVING, service="who"),
        ],
        services=[make_service_view(load=5.0)],
    )
    keep = policy("aryl").not_lent_reasons
    assert [keep(snapshot, NodeName(name)) for name in ("t1", "l1", "s1", "none")] == [()] * 4
