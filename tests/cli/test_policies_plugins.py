"""Policies of other distributions: found, listed and run beside the built-in ones, or named."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from importlib import import_module
from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator import plugins
from coordinator.policies import registry
from coordinator.policies.contract.decisions import Start
from coordinator.policies.registry import POLICIES, policy
from tests.cli.fake_cell import FakeCell, aryl
from tests.harness.builders import make_job_view, make_node_view, make_snapshot
from tests.harness.plugged import acme, block, distribution
from tests.tables import each_row

ROOT = Path(__file__).parents[2]


@pytest.fixture(autouse=True)
def afresh() -> Iterator[None]:
    """Each test looks for distributions itself, and leaves none behind."""
    plugins.load.cache_clear()
    yield
    plugins.load.cache_clear()
    registry.add(())


@pytest.fixture
def smallest(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A distribution with one good policy, on the path."""
    place = acme(tmp_path)
    monkeypatch.syspath_prepend(str(place))
    return tmp_path


def offer(root: Path, patch: pytest.MonkeyPatch, name: str, entries: dict[str, str]) -> None:
    """Another distribution beside it."""
    patch.syspath_prepend(str(distribution(root, name, entries)))


def test_an_installed_policy_decides_under_its_name_with_knobs(smallest: Path) -> None:
    """Its own order, a knob of its own that turns it round, and the built-in ones as before."""
    assert "smallest" not in registry.every()
    plugins.load()
    jobs = [make_job_view("a", gpus_per_worker=6), make_job_view("b", gpus_per_worker=4)]
    snapshot = make_snapshot(nodes=[make_node_view("n1")], jobs=jobs)

    def first(name: str) -> list[str]:
        decisions = policy(name).allocate(snapshot, b"").decisions
        return [decision.job_id for decision in decisions if isinstance(decision, Start)]

    assert first("smallest") == ["b"]
    assert first("smallest:most_gpus=3") == ["a"]
    assert first("fifo") == ["a"]
    with pytest.raises(ConfigError, match="most_gpus"):
        policy("smallest:most=3")
    with pytest.raises(ConfigError, match="most_gpus=0"):
        policy("smallest:most_gpus=0")
    assert set(registry.every()) == {*POLICIES, "smallest"}


def test_the_example_can_be_checked_by_type_checkers() -> None:
    """It has each name from the module that defines it, and packages say that they are typed."""
    imports = [
        each
        for each in ast.walk(ast.parse(block("python")))
        if isinstance(each, ast.ImportFrom) and each.module
        if each.module.startswith(("common.", "coordinator."))
    ]
    for each in imports:
        module = import_module(str(each.module))
        assert {getattr(module, name.name).__module__ for name in each.names} == {each.module}
    assert all((ROOT / str(each.module).split(".")[0] / "py.typed").exists() for each in imports)


def test_it_is_listed_with_its_origin_its_parts_and_knobs(smallest: Path) -> None:
    """Beside the built-in ones, which say so."""
    rows = aryl(FakeCell({}), "policies", "-o", "json").json["policies"]
    found = {row["name"]: row for row in rows}
    assert found["smallest"]["origin"] == "acme-sched 1.2"
    assert found["smallest"]["parts"]["order"] == "GPUs of the base gang"
    assert found["smallest"]["knobs"] == [
        {
            "name": "most_gpus",
            "values": "whole number >= 1",
            "default": "64",
            "says": "larger gangs start after all smaller ones",
        }
    ]
    assert {found[name]["origin"] for name in POLICIES} == {"built-in"}
    wide = aryl(FakeCell({}), "policies", "-o", "wide").out
    assert "order: GPUs of the base gang" in wide
    assert "most_gpus=64 (whole number >= 1)" in wide


@pytest.mark.parametrize(
    ("entries", "says"),
    [
        ({"broken": "no_such_module:POLICY"}, "no_such_module:POLICY cannot be loaded: ModuleNotF"),
        ({"missing": "acme_smallest:NOTHING"}, "cannot be loaded: AttributeError"),
        ({"number": "math:pi"}, "it is a float, expected a coordinator.policies.policy.Policy"),
        ({"other": "acme_smallest:POLICY"}, "calls itself 'smallest'"),
        ({"all": "acme_smallest:POLICY"}, "its name is reserved"),
        ({"a,b": "acme_smallest:POLICY"}, "characters other than"),
        ({"fifo": "acme_smallest:POLICY"}, "the built-in policy of this name stays"),
    ],
)
def test_what_cannot_be_used_is_named_and_stops_no_other(
    smallest: Path, monkeypatch: pytest.MonkeyPatch, entries: dict[str, str], says: str
) -> None:
    """The distribution and why on standard error; the list is whole, and exit code 0."""
    offer(smallest, monkeypatch, "bad-dist", entries)
    run = aryl(FakeCell({}), "policies", "-o", "name")
    assert (run.code, set(run.out.split())) == (0, {*POLICIES, "smallest"})
    (name,) = entries
    assert f"policy {name!r} of bad-dist 1.2 cannot be used: " in run.err
    assert says in run.err
    if name in POLICIES:
        assert policy(name) is POLICIES[name]
    else:
        with pytest.raises(ConfigError, match=r"of bad-dist 1\.2 cannot be used"):
            policy(name)


def test_one_name_of_two_distributions_is_neithers(
    smallest: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever stands first on the path: who installed both could not tell which one decides."""
    offer(smallest, monkeypatch, "second", {"smallest": "acme_smallest:POLICY"})
    plugins.load()
    with pytest.raises(ConfigError, match=r"of acme-sched 1\.2 and second 1\.2 cannot be used"):
        policy("smallest")


def test_an_unknown_name_lists_those_of_others_too(smallest: Path) -> None:
    """What is installed is a valid name as any other."""
    plugins.load()
    with pytest.raises(ConfigError, match="sjf, smallest, srsf"):
        policy("smalest")


@pytest.mark.slow
def test_a_simulation_runs_it_in_other_processes_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two runs over two processes find it, also where a comparison went before it was there."""
    trace = tmp_path / "jobs.csv"
    trace.write_text("submit_s,duration_s,gpus\n0,100,8\n0,100,4\n0,100,4\n0,100,8\n")
    options = ("--workload", str(trace), "--cluster", "1x8", "--no-delays", "--cores", "2")
    before = aryl(FakeCell({}), "simulate", *options, "--policy", "fifo,sjf", "-o", "json")
    assert before.code == 0, before.err
    place = acme(tmp_path)
    monkeypatch.syspath_prepend(str(place))
    monkeypatch.setenv("PYTHONPATH", str(place))
    plugins.load.cache_clear()
    run = aryl(FakeCell({}), "simulate", *options, "--policy", "fifo,smallest", "-o", "json")
    assert run.code == 0, run.err
    means = {each["policy"]: each["jct_s"]["mean"] for each in json.loads(run.out)["runs"]}
    assert means["smallest"] == pytest.approx((100 + 100 + 200 + 300) / 4)
    assert means["fifo"] == pytest.approx((100 + 200 + 200 + 300) / 4)


@each_row("command", [("up",), ("simulate", "--workload", "paper-1")])
@each_row(
    ("name", "says"),
    [
        ("tiresia", "'tiresia' is not one of "),
        ("tiresias:promot=8", "expected KNOB=VALUE with one of limits, "),
        ("tiresias:promote=soon", "promote=soon"),
        ("tiresias:line=middle", "expected one of first-start, running, entry"),
        ("afs:seed=1", "afs has no knobs"),
    ],
)
def test_a_policy_or_knob_that_is_none_is_refused_before_anything_starts(
    tmp_path: Path, command: tuple[str, ...], name: str, says: str
) -> None:
    """Exit code 2, the valid ones on standard error, nothing on standard output, no file."""
    environ = {"ARYL_HOME": str(tmp_path / "home")}
    run = aryl(FakeCell({}), *command, "--policy", name, environ=environ)
    assert (run.code, run.out) == (2, "")
    assert says in run.err
    assert not (tmp_path / "home").exists()


@pytest.mark.slow
def test_a_coordinator_names_what_it_cannot_use_and_runs_what_it_can(smallest: Path) -> None:
    """The settings may name a policy of another distribution; a broken one beside it is a warning,
    and an unknown knob of it ends the start with the valid ones."""
    broken = distribution(smallest, "bad-dist", {"broken": "no_such_module:POLICY"})
    config = smallest / "coordinator.toml"

    def check(policy_name: str) -> subprocess.CompletedProcess[str]:
        text = 'cell = "c"\nnats_url = "nats://127.0.0.1:4222"\n'
        config.write_text(f'{text}[engine]\npolicy = "{policy_name}"\n')
        return subprocess.run(
            [
                sys.executable,
                "-m",
                "coordinator.service.daemon",
                "--config",
                str(config),
                "--check",
            ],
            env={**os.environ, "PYTHONPATH": f"{smallest / 'acme-sched'}:{broken}:{ROOT}"},
            capture_output=True,
            text=True,
            check=False,
            timeout=60,
        )

    good = check("smallest:most_gpus=8")
    assert good.returncode == 0, good.stderr
    assert "level=warning" in good.stderr
    assert "policy 'broken' of bad-dist 1.2 cannot be used" in good.stderr
    for name, says in (("smallest:most=8", "one of most_gpus"), ("broken", "of bad-dist 1.2")):
        bad = check(name)
        assert bad.returncode == 2
        assert says in bad.stderr.splitlines()[-1]
