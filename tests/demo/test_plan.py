"""A cell's plan: its files are ones that coordinator and agent accept, and its times fit."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.gpu.fake.fleet import parse_fleet
from agent.lease.renewal import LAST_RESORT_MARGIN_S, RENEWALS_PER_TTL, RETRIES_PER_TTL
from agent.settings import AgentSettings
from agent.storage.node_lock import WATCH_S
from common.model import CheckpointSpec, Pool, ServiceName
from common.settings import load
from coordinator.demo.plan import (
    SERVICE,
    CellPlan,
    Periods,
    agent_toml,
    coordinator_toml,
    fleet_toml,
    node_plans,
    toml,
)
from coordinator.demo.supervise import RESTART_S
from coordinator.policies.contract.snapshot import ServiceView, nodes_for
from coordinator.service.settings import CoordinatorSettings
from tests.tables import each_row

ROOT = Path(__file__).parents[2]
NATS_URL = "nats://127.0.0.1:4222"
ROUTER_URL = "http://127.0.0.1:8000"
SERVER_PORTS = range(8001, 8021)
START_S = 2.0
"""For a process to start, to look at the lease and to pass once."""
ODD_DIRECTORY = 'a "quoted" \\ näme'


def agents(plan: CellPlan, directory: Path) -> list[AgentSettings]:
    """Every agent's settings, read as the agent reads them."""
    found: list[AgentSettings] = []
    for node in node_plans(plan, directory, server_ports=SERVER_PORTS):
        node.directory.mkdir(parents=True)
        node.config.write_text(
            agent_toml(plan, node, bus_url=NATS_URL, router_url=ROUTER_URL), encoding="utf-8"
        )
        settings = load(node.config, AgentSettings)
        settings.check()
        found.append(settings)
    return found


def test_every_agents_file_is_accepted_whatever_the_directory_is_called(tmp_path: Path) -> None:
    """Quotes, backslashes and umlauts in a path survive the way through TOML."""
    directory = tmp_path / ODD_DIRECTORY
    found = agents(CellPlan(training_nodes=2, inference_nodes=2), directory)
    names = ["train-1", "train-2", "infer-1", "infer-2"]
    assert [settings.node for settings in found] == names
    for settings, name in zip(found, names, strict=True):
        assert settings.state_dir == str(directory / "nodes" / name / "state")
        is_inference = settings.home_pool == Pool.INFERENCE
        assert (settings.server is not None) == is_inference
        assert settings.service == (SERVICE if is_inference else None)


def test_no_two_servers_share_a_port_or_a_file(tmp_path: Path) -> None:
    """Twenty inference nodes on one machine keep out of each other's way."""
    plan = CellPlan(training_nodes=1, inference_nodes=20)
    nodes = node_plans(plan, tmp_path, server_ports=SERVER_PORTS)
    ports = [node.server_port for node in nodes if node.server_port]
    assert len(set(ports)) == 20
    assert len({node.config for node in nodes}) == 21
    assert len({node.server_directory for node in nodes}) == 21


@pytest.mark.parametrize("inference_nodes", [0, 1, 6])
def test_the_coordinators_file_is_accepted(tmp_path: Path, inference_nodes: int) -> None:
    """Also of a cell without a service."""
    plan = CellPlan(inference_nodes=inference_nodes)
    file = tmp_path / "coordinator.toml"
    file.write_text(coordinator_toml(plan, nats_url=NATS_URL, name="c1"))
    settings = load(file, CoordinatorSettings)
    assert [service.name for service in settings.engine.services] == [SERVICE][:inference_nodes]


def test_a_lent_node_comes_home_in_time_by_the_plan() -> None:
    """Lease, grace, device and warm-up together fit the deadline, else nothing is ever lent; and so
    they do when the last resort has to fire, to start and to watch an agent that hangs."""
    periods = Periods()
    home_s = periods.lease_ttl_s + periods.grace_s + periods.device_free_s + periods.warm_up_s
    assert home_s + LAST_RESORT_MARGIN_S + START_S + WATCH_S <= periods.reclaim_deadline_s
    assert periods.loan_pass_s < periods.lease_ttl_s < periods.reclaim_deadline_s


def test_a_lease_outlives_a_takeover_by_the_plan() -> None:
    """The last renewal was at most a third of the TTL ago when the coordinator dies, and the first
    one after it comes at most a retry late: in between the leader's TTL runs out, and somebody
    starts."""
    periods = Periods()
    outage_s = periods.lease_ttl_s * (1 - 1 / RENEWALS_PER_TTL - 1 / RETRIES_PER_TTL)
    assert outage_s >= max(periods.leader_ttl_s, periods.rebuild_wait_s) + RESTART_S + START_S


def test_what_a_visitor_submits_may_run_on_lent_nodes(tmp_path: Path) -> None:
    """A job with the default grace, and the example of the docs: both fit the service's limit,
    and an agent whose lease runs out gives its workers no less."""
    plan = CellPlan(inference_nodes=1)
    file = tmp_path / "coordinator.toml"
    file.write_text(coordinator_toml(plan, nats_url=NATS_URL, name="c1"))
    (service,) = load(file, CoordinatorSettings).engine.services
    example = tomllib.loads((ROOT / "docs/examples/train.toml").read_text())
    assert CheckpointSpec().grace_s <= service.max_grace_s
    assert example["checkpoint"]["grace_s"] <= service.max_grace_s
    for settings in agents(plan, tmp_path):
        assert settings.vacate_grace_s >= service.max_grace_s


@each_row(("inference_nodes", "headroom_nodes"), [(2, 0), (3, 1), (6, 1), (49, 1)])
def test_the_peak_needs_every_node_and_a_quiet_hour_does_not(
    tmp_path: Path, inference_nodes: int, headroom_nodes: int
) -> None:
    """By the coordinator's own rule for its settings: load above what the nodes are rated for
    would be refused with nobody lending at all, and a demo that can lend nothing shows nothing."""
    plan = CellPlan(inference_nodes=inference_nodes, headroom_nodes=headroom_nodes)
    file = tmp_path / "coordinator.toml"
    file.write_text(coordinator_toml(plan, nats_url=NATS_URL, name="c1"))
    (service,) = load(file, CoordinatorSettings).engine.services
    view = ServiceView(
        name=ServiceName(service.name), mode=service.mode, min_serving=service.min_serving,
        capacity_per_node=service.capacity_per_node, headroom_ratio=service.headroom_ratio,
        reclaim_deadline_s=service.reclaim_deadline_s, return_s=48.0, max_grace_s=30.0,
        hold_off_s=5.0, loan_period_s=2.0,
    )  # fmt: skip
    assert nodes_for(view, plan.peak_req_per_s, inference_nodes) == inference_nodes
    assert nodes_for(view, 0.45 * plan.peak_req_per_s, inference_nodes) < inference_nodes


def test_a_cell_without_a_service_still_has_a_plan() -> None:
    """Nothing is divided by its nodes."""
    assert CellPlan(inference_nodes=0).capacity_per_node > 0


def test_the_fleet_is_one_that_the_fake_nvml_reads() -> None:
    """As many GPUs as the plan says; two cells on one machine have different ones."""
    plan = CellPlan(gpus_per_node=4)
    one, other = (parse_fleet(fleet_toml(plan, name=name)) for name in ("/a", "/b"))
    assert one.gpu_count == 4
    assert one.uuid_of("train-1", 0) != other.uuid_of("train-1", 0)


PRINTABLE = st.text(st.characters(codec="utf-8", exclude_categories=("Cc", "Cs")), max_size=20)
PLAIN = st.recursive(
    st.booleans() | st.integers(-(2**53), 2**53) | PRINTABLE,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), inner, max_size=3)
    ),
    max_leaves=8,
)


@given(st.dictionaries(st.from_regex(r"[a-z_]{1,8}", fullmatch=True), PLAIN, max_size=4))
def test_what_is_written_as_toml_is_read_back_the_same(values: dict[str, object]) -> None:
    """Any settings of plain values, nested as they like."""
    assert tomllib.loads(toml(values)) == values
