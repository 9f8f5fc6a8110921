"""The packaged alerts, as Prometheus' own promtool judges them. Skipped where it is missing."""

from __future__ import annotations

import json
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import yaml

ROOT = Path(__file__).parents[2]
ALERTS = ROOT / "docs" / "monitoring" / "alerts.yml"
SCRAPES = ROOT / "docs" / "monitoring" / "prometheus.yml"
PROMTOOL = shutil.which("promtool")

pytestmark = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed")

CELL = 'cell="prod"'
CHAT = f'{CELL}, service="chat"'
LATE = f'aryl_returns_total{{{CHAT}, kind="reclaim", outcome="late"}}'
USED = "aryl_reclaim_deadline_used_ratio_bucket"
SERVING = f'aryl_service_nodes{{{CHAT}, role="serving"}}'
LEAST = f"aryl_service_min_serving_nodes{{{CHAT}}}"
POOL = f'{CELL}, pool="training"'
DISK = 'instance="n:9100", mountpoint="/var", fstype="ext4"'
UNIT = 'instance="n:9100", name="aryl-agent.service", state="active"'


class Case(NamedTuple):
    """What an alert fires for, and what it keeps quiet for, after `at`.

    Series as promtool writes them: `0+1x9` is 0, 1, ..., 9, one a minute.
    labels: of the alert that fires, without its severity.
    """

    fires: dict[str, str]
    labels: dict[str, str]
    quiet: dict[str, str]
    at: str = "20m"


PROD = {"cell": "prod"}
IN_CHAT = {"cell": "prod", "service": "chat"}
IN_POOL = {"cell": "prod", "pool": "training"}
CASES = {
    "ArylPromiseBroken": Case(
        {LATE: "0x15 1x20"}, IN_CHAT | {"kind": "reclaim"}, {LATE: "7x40"}
    ),
    "ArylNodeOverdue": Case(
        {f"aryl_loans_overdue{{{CHAT}}}": "0x19 1"}, IN_CHAT,
        {f"aryl_loans_overdue{{{CHAT}}}": "1x19 0"},
    ),
    "ArylReclaimsNearDeadline": Case(
        {f'{USED}{{{CHAT}, le="0.9"}}': "0x40", f'{USED}{{{CHAT}, le="+Inf"}}': "0+1x40",
         f'{USED}{{{CHAT}, le="1.0"}}': "0+1x40"},
        IN_CHAT,
        {f'{USED}{{{CHAT}, le="0.5"}}': "0+1x40", f'{USED}{{{CHAT}, le="+Inf"}}': "0+1x40"},
    ),
    "ArylTooFewServing": Case(
        {SERVING: "1x40", LEAST: "2x40"}, IN_CHAT, {SERVING: "1x15 2x40", LEAST: "2x40"}
    ),
    "ArylLoadUnknown": Case(
        {f"aryl_service_load_known{{{CHAT}}}": "0x40"}, IN_CHAT,
        {f"aryl_service_load_known{{{CHAT}}}": "1x18 0x40"},
    ),
    "ArylNoLeader": Case(
        {f'aryl_leader{{{CELL}, instance="a"}}': "0x40",
         f'aryl_leader{{{CELL}, instance="b"}}': "1x10 0x40"},
        PROD,
        {f'aryl_leader{{{CELL}, instance="a"}}': "0x40",
         f'aryl_leader{{{CELL}, instance="b"}}': "1x40"},
    ),
    "ArylCoordinatorDown": Case(
        {'up{job="aryl-coordinator", instance="a"}': "0x40"},
        {"job": "aryl-coordinator", "instance": "a"},
        {'up{job="aryl-coordinator", instance="a"}': "0x19 1x40", 'up{job="else"}': "0x40"},
    ),
    "ArylNoPasses": Case(
        {f"aryl_last_pass_age_seconds{{{CELL}}}": "121x40"}, PROD,
        {f"aryl_last_pass_age_seconds{{{CELL}}}": "30x40"},
    ),
    "ArylBadMessages": Case(
        {f'aryl_bad_messages_total{{{CELL}, kind="report"}}': "0x15 3x40"},
        PROD | {"kind": "report"},
        {f'aryl_bad_messages_total{{{CELL}, kind="report"}}': "3x40"},
    ),
    "ArylOverload": Case(
        {f"aryl_reports_total{{{CELL}}}": "0+100x40",
         f"aryl_reports_shed_total{{{CELL}}}": "0+10x40"},
        PROD,
        {f"aryl_reports_total{{{CELL}}}": "0+100x40",
         f"aryl_reports_shed_total{{{CELL}}}": "0+1x40"},
    ),
    "ArylClockWrong": Case(
        {f"aryl_clock_warning{{{CELL}}}": "1x40"}, PROD,
        {f"aryl_clock_warning{{{CELL}}}": "0x18 1x40"},
    ),
    "ArylJobsWithoutRoom": Case(
        {f"aryl_jobs_without_room{{{CELL}}}": "2x90"}, PROD,
        {f"aryl_jobs_without_room{{{CELL}}}": "0x50 2x90"}, "80m",
    ),
    "ArylJobsStalled": Case(
        {f"aryl_jobs_stalled{{{CELL}}}": "1x40"}, PROD,
        {f"aryl_jobs_stalled{{{CELL}}}": "0x10 1x40"},
    ),
    "ArylNodesMissing": Case(
        {f'aryl_nodes{{{POOL}, role="training"}}': "3x40",
         f'aryl_nodes{{{POOL}, role="lost"}}': "1x40", f"aryl_nodes_heard{{{POOL}}}": "3x40"},
        IN_POOL,
        {f'aryl_nodes{{{POOL}, role="training"}}': "4x40", f"aryl_nodes_heard{{{POOL}}}": "4x40"},
    ),
    "ArylAgentDown": Case(
        {'up{job="aryl-agent", instance="a"}': "0x40"}, {"job": "aryl-agent", "instance": "a"},
        {'up{job="aryl-agent", instance="a"}': "1x16 0x40"},
    ),
    "ArylNodeQuarantined": Case(
        {f'aryl_nodes{{{POOL}, role="quarantined"}}': "1x40"}, IN_POOL,
        {f'aryl_nodes{{{POOL}, role="quarantined"}}': "0x40",
         f'aryl_nodes{{{POOL}, role="training"}}': "1x40"},
    ),
    "ArylNodeTakesNothing": Case(
        {f'aryl_nodes_closed{{{CELL}, reason="refuses"}}': "1x40"}, PROD,
        {f'aryl_nodes_closed{{{CELL}, reason="cordoned"}}': "1x40"},
    ),
    "ArylGpusOut": Case(
        {f'aryl_gpus{{{POOL}, type="H100", holder="out"}}': "1x40"}, IN_POOL | {"type": "H100"},
        {f'aryl_gpus{{{POOL}, type="H100", holder="job"}}': "8x40"},
    ),
    "ArylGpuBreakerOpen": Case(
        {f"aryl_gpu_breaker_open{{{CELL}}}": "1x40"}, PROD,
        {f"aryl_gpu_breaker_open{{{CELL}}}": "0x40"},
    ),
    "ArylCollectorFails": Case(
        {f'aryl_collector_success{{{CELL}, node="n", collector="gpu"}}': "0x40"},
        PROD | {"node": "n", "collector": "gpu"},
        {f'aryl_collector_success{{{CELL}, node="n", collector="gpu"}}': "0x15 1x40"},
    ),
    "ArylDiskNearlyFull": Case(
        {f"node_filesystem_avail_bytes{{{DISK}}}": "19x40",
         f"node_filesystem_size_bytes{{{DISK}}}": "100x40"},
        {"instance": "n:9100", "mountpoint": "/var", "fstype": "ext4"},
        {f"node_filesystem_avail_bytes{{{DISK}}}": "21x40",
         f"node_filesystem_size_bytes{{{DISK}}}": "100x40"},
    ),
    "ArylUnitNotActive": Case(
        {f"node_systemd_unit_state{{{UNIT}}}": "0x40"},
        {"instance": "n:9100", "name": "aryl-agent.service", "state": "active"},
        {f"node_systemd_unit_state{{{UNIT}}}": "1x40"},
    ),
    "ArylCertificateEnds": Case(
        {'probe_ssl_earliest_cert_expiry{job="aryl-nats-certificate"}': f"{13 * 86400}x40"},
        {"job": "aryl-nats-certificate"},
        {'probe_ssl_earliest_cert_expiry{job="aryl-nats-certificate"}': f"{15 * 86400}x40"},
    ),
}  # fmt: skip


def rules() -> dict[str, dict[str, Any]]:
    """Every alert by name."""
    found = yaml.safe_load(ALERTS.read_text())
    return {rule["alert"]: rule for group in found["groups"] for rule in group["rules"]}


def promtool(*arguments: str | Path) -> None:
    """Run promtool, which has to be content."""
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, *arguments], capture_output=True, text=True, check=False, timeout=300
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_each_alert_fires_for_its_trouble_and_for_nothing_else(tmp_path: Path) -> None:
    """Each alert has one case that fires it and one, near by, that does not."""
    bare = yaml.safe_load(ALERTS.read_text())
    for group in bare["groups"]:
        for rule in group["rules"]:
            del rule["annotations"]  # which promtool would compare word by word
    (tmp_path / "alerts.yml").write_text(json.dumps(bare))
    known = rules()
    assert CASES.keys() == known.keys()
    tests: list[dict[str, Any]] = []
    for name, case in CASES.items():
        fired = {"exp_labels": case.labels | {"severity": known[name]["labels"]["severity"]}}
        for series, expected in ((case.fires, [fired]), (case.quiet, [])):
            tests.append(
                {
                    "name": name,
                    "interval": "1m",
                    "input_series": [{"series": s, "values": v} for s, v in series.items()],
                    "alert_rule_test": [
                        {"eval_time": case.at, "alertname": name, "exp_alerts": expected}
                    ],
                }
            )
    cases = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yml").write_text(json.dumps(cases))
    promtool("test", "rules", tmp_path / "cases.yml")


def test_nodes_whose_servers_are_down_do_not_count_as_serving(tmp_path: Path) -> None:
    """Their role stays `serving`; an agent whose page is not scraped takes no node away."""
    shutil.copy(ALERTS, tmp_path)
    alert = rules()["ArylTooFewServing"]
    annotations = {
        "summary": "chat has 1 serving nodes, fewer than min_serving",
        "runbook_url": alert["annotations"]["runbook_url"],
    }
    fired = {"exp_labels": IN_CHAT | {"severity": "page"}, "exp_annotations": annotations}
    tests = [
        {
            "interval": "1m",
            "input_series": [
                {"series": SERVING, "values": "3x40"},
                {"series": LEAST, "values": "2x40"},
                {"series": f'aryl_server_healthy{{{CHAT}, node="a"}}', "values": "0x40"},
                {"series": f'aryl_server_healthy{{{CHAT}, node="b"}}', "values": of_b},
            ],
            "alert_rule_test": [
                {"eval_time": "20m", "alertname": "ArylTooFewServing", "exp_alerts": expected}
            ],
        }
        for of_b, expected in (("0x40", [fired]), ("1x40", []), ("stale", []))
    ]
    cases = {"rule_files": ["alerts.yml"], "evaluation_interval": "1m", "tests": tests}
    (tmp_path / "cases.yml").write_text(json.dumps(cases))
    promtool("test", "rules", tmp_path / "cases.yml")


def test_no_leader_is_an_alert_where_no_coordinator_is_scraped_any_more(tmp_path: Path) -> None:
    """A series that is gone is no 0, and still nobody leads."""
    shutil.copy(ALERTS, tmp_path)
    case = {
        "interval": "1m",
        "alert_rule_test": [
            {
                "eval_time": "5m",
                "alertname": "ArylNoLeader",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "page"},
                        "exp_annotations": rules()["ArylNoLeader"]["annotations"],
                    }
                ],
            }
        ],
    }
    (tmp_path / "case.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [case]}))
    promtool("test", "rules", tmp_path / "case.yml")


def test_no_leader_is_an_alert_for_the_cell_whose_coordinators_are_gone(tmp_path: Path) -> None:
    """Others may have theirs."""
    shutil.copy(ALERTS, tmp_path)
    alert = rules()["ArylNoLeader"]
    case = {
        "interval": "1m",
        "input_series": [
            {"series": 'aryl_leader{cell="gone"}', "values": "1x10 stale"},
            {"series": 'aryl_leader{cell="there"}', "values": "1x60"},
        ],
        "alert_rule_test": [
            {
                "eval_time": "30m",
                "alertname": "ArylNoLeader",
                "exp_alerts": [
                    {
                        "exp_labels": {"severity": "page", "cell": "gone"},
                        "exp_annotations": alert["annotations"],
                    }
                ],
            }
        ],
    }
    (tmp_path / "case.yml").write_text(json.dumps({"rule_files": ["alerts.yml"], "tests": [case]}))
    promtool("test", "rules", tmp_path / "case.yml")


def test_alerts_and_the_example_of_a_configuration_are_what_prometheus_reads(
    tmp_path: Path,
) -> None:
    """promtool takes both files as they are packaged."""
    key = tmp_path / "metrics.key"
    key.write_text("secret\n")
    shutil.copy(ALERTS, tmp_path)
    text = re.sub(r"credentials_file: \S+", f"credentials_file: {key}", SCRAPES.read_text())
    (tmp_path / "prometheus.yml").write_text(text)
    promtool("check", "config", tmp_path / "prometheus.yml")
