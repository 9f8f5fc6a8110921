"""Sweeps: every key changes what it names, every mistake lists what there is."""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec import structs

from common.errors import ConfigError
from common.model import NodeName
from coordinator.engine.state.accounting import Quantiles
from coordinator.policies.knob_text import knobs
from coordinator.policies.registry import POLICIES
from coordinator.sim.inputs.failure_sources import FailureSource
from coordinator.sim.inputs.inputs import Shares
from coordinator.sim.inputs.sweep import keys, parse_sweep, sweep, vary
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.compare import Task, label, means
from coordinator.sim.run.outages import Crash
from coordinator.sim.run.play import RunResult
from coordinator.sim.run.runtime import Saves
from coordinator.workloads.paper import PaperParameters
from coordinator.workloads.shaping import RuntimeModel
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import FEW, SLICE, small
from tests.tables import each_row

BASE = Task(workload=str(SLICE), cluster="1x64", options=RunOptions(policy="aryl-elastic"))


Simulate = Callable[..., Run]


@pytest.fixture
def simulate() -> Simulate:
    """`aryl simulate ARGS` of a few jobs on one pool, with no cell anywhere."""
    given = ("--workload", str(FEW), "--cluster", "1x64", "--backend", "sequential")
    return lambda *args: aryl(FakeCell({}), "simulate", *given, *args)


# --- keys ---------------------------------------------------------------------------------------


def test_options_and_fields_change_what_they_name() -> None:
    """One of each kind."""
    assert vary(BASE, "elastic", "0.2").shares == Shares(elastic=0.2)
    assert vary(BASE, "cluster", "2x64").cluster == "2x64"
    assert vary(BASE, "loss", "0.1").options.loss_ratio == 0.1
    assert vary(BASE, "speedup", "lossy").options.speedup == RuntimeModel.LOSSY
    assert vary(BASE, "checkpoints", "60").options.saves == Saves.PERIODIC
    turned = vary(vary(BASE, "policy.resize_cost_s", "7"), "policy.reclaim", "random")
    assert turned.options.policy_text == "aryl-elastic:resize_cost_s=7:reclaim=random"
    assert turned.options.policy == "aryl-elastic"
    assert vary(BASE, "failures", "philly-drawn").options.failures == FailureSource.PHILLY_DRAWN
    assert vary(BASE, "restarts", "7").options.restarts == 7
    assert vary(BASE, "prerun", "30").options.prerun_s == 30.0
    assert not vary(BASE, "oracle", "false").options.is_oracle
    assert not vary(BASE, "delays", "false").options.has_delays
    assert vary(BASE, "skip-zero-gpus", "true").skip_zero_gpus
    twice = vary(vary(BASE, "crash", "t00000@5+5"), "crash", "t00000@60+6")
    assert twice.options.crashes == (Crash(node=NodeName("t00000"), at_s=60.0, down_s=6.0),)
    drawn = vary(vary(BASE, "workload.load", "0.9"), "workload.gangs", "3").parameters
    assert drawn is not None
    assert (drawn.load, drawn.gangs) == (0.9, 3)


def _owner(key: str) -> tuple[Task, str]:
    """A task whose policy has the knob that a key names, and the knob's own value there; or the
    generator's own value of a parameter."""
    part, _, name = key.partition(".")
    if part == "workload" and name:
        return BASE, str(getattr(PaperParameters(), name))
    if part != "policy" or name in {knob.name for knob in knobs(POLICIES["aryl-elastic"])}:
        return BASE, "1"
    policy, knob = next(
        (made, knob) for made in POLICIES.values() for knob in knobs(made) if knob.name == name
    )
    options = structs.replace(BASE.options, policy=policy.name)
    return structs.replace(BASE, options=options), knob.default


def test_every_key_can_be_swept(tmp_path: Path) -> None:
    """None is listed that then fails on a value that suits it."""
    tenants = tmp_path / "tenants.toml"
    tenants.write_text('[[tenants]]\nname = "a"\nweight = 2\n')
    values = {
        "checkpoints": "never", "cluster": "1x64", "speedup": "linear", "load": "x.csv",
        "workload": "paper-1", "policy.reclaim": "random", "policy.reclaim_cost": "jobs",
        "crash": "t00000@60+60", "failures": "philly", "tenants": str(tenants),
    }  # fmt: skip
    for key in keys():
        base, default = _owner(key)
        for value in (values.get(key, default), "1", "0.5", "true"):
            try:
                made = vary(base, key, value)
            except ConfigError:
                continue
            assert made.swept == {key: value}
            break
        else:
            pytest.fail(f"{key} takes none of the values that were tried")


def test_settings_and_delays_reach_the_run() -> None:
    """What the engine and the pretend nodes get is what the row says."""
    task = BASE
    for key, value in (
        ("service.headroom_ratio", "0.25"),
        ("engine.loan_period_s", "60"),
        ("delays.start_s", "3.5"),
        ("delays.resize_s", "4"),
        ("policy.resize_cost_s", "9"),
    ):
        task = vary(task, key, value)
    stage = Stage(small(20), task.options)
    assert [service.headroom_ratio for service in stage.settings.services] == [0.25]
    assert stage.settings.loan_period_s == 60.0
    assert stage.settings.policy.endswith(":resize_cost_s=9")
    assert task.options.times.delays().start_s == 3.5
    assert task.options.times.resize_s == 4.0


@each_row(
    ("text", "said"),
    [
        ("elastc=1", "'elastc' is not one of .*elastic.*policy.resize_cost_s.*workload.load"),
        ("policy.speed=1", "'policy.speed' is not one of"),
        ("policy=1", "policy takes several values by itself: --policy A,B"),
        ("seed=1,2", r"seed takes several values by itself: --seeds 1\.\.10"),
        ("scenario=basic", "scenario takes several values by itself: --scenario A,B"),
        ("failures=all", "failures: 'all', expected none, philly or philly-drawn"),
        ("restarts=-1", "restarts: '-1', expected a whole number from 0 to 1000000"),
        ("oracle=maybe", "oracle: 'maybe', expected true or false"),
        ("crash=t1", "crash t1: expected NODE@SECONDS"),
        ("tenants=nowhere.toml", "^tenants nowhere.toml: no such file"),
        ("prerun=0", "prerun: '0', expected a number from 1 to"),
        ("service.name=a", "'service.name' is not one of"),
        ("elastic", "expected KEY=VALUE"),
        ("=1", "expected KEY=VALUE"),
        ("elastic=", "expected KEY=VALUE"),
        ("elastic=0.1,0.1", "a value is given twice"),
        ("elastic=0.1,0.10", "a value is given twice"),
        ("policy.resize_cost_s=5,5.0", "a value is given twice"),
        ("elastic=2", "elastic: '2', expected a number from 0 to 1"),
        ("elastic=0_1", "elastic: '0_1', expected a number from 0 to 1"),
        ("checkpoints=1_800", "checkpoints: '1_800', expected"),
        ("loss=nan", "loss: 'nan', expected a number from 0 to 0.9"),
        ("workload.load=x", "^workload.load: 'x': expected a number$"),
        ("workload.rare_jobs=0.5", "^workload.rare_jobs: '0.5': expected a whole number"),
        ("workload.load=nan", "workload.load: 'nan'"),
        ("service.headroom_ratio=7", "service.headroom_ratio: '7': Expected `float` <= 1"),
        ("delays.start_s=-1", "delays.start_s: '-1', expected 0 to"),
        ("policy.resize_cost_s=x", "resize_cost_s=x"),
        ("speedup=magic", "speedup: 'magic', expected"),
    ],
)
def test_a_mistake_names_key_and_value(text: str, said: str) -> None:
    """One line that says what was expected, or lists the keys."""
    with pytest.raises(ConfigError, match=said):
        sweep([BASE], [text])


def test_delays_of_a_run_without_delays_are_a_mistake() -> None:
    """They would print the same row again and again; with them each is a run of its own."""
    instant = structs.replace(BASE, options=structs.replace(BASE.options, has_delays=False))
    with pytest.raises(ConfigError, match=r"delays\.drain_s says nothing of a run without delays"):
        sweep([instant], ["delays.drain_s=1,100"])
    assert len(sweep([BASE], ["delays.drain_s=1,100"])) == 2


@each_row("is_first", [True, False])
@each_row("has_delays", [True, False])
def test_a_steps_time_is_left_out_where_a_swept_run_has_no_delays(
    is_first: bool, has_delays: bool
) -> None:
    """Whatever is named first, and whatever is so without the sweep: one run without delays, and
    one at each time with them, told in the order of the keys."""
    base = structs.replace(BASE, options=structs.replace(BASE.options, has_delays=has_delays))
    texts = ["delays=true,false", "delays.start_s=1,100"]
    made = sweep([base], texts if is_first else texts[::-1])
    told = {(task.options.has_delays, task.options.times.start_s) for task in made}
    assert told == {(True, 1.0), (True, 100.0), (False, BASE.options.times.start_s)}
    assert len(made) == 3
    with_both = [tuple(task.swept) for task in made if task.options.has_delays]
    keys = ("delays", "delays.start_s")
    assert with_both == [keys if is_first else keys[::-1]] * 2
    assert [task.swept for task in made if not task.options.has_delays] == [{"delays": "false"}]


def test_a_steps_time_that_no_run_has_is_refused_with_what_helps() -> None:
    """Also where the sweep itself takes the delays away; where one has them, its value is read."""
    with pytest.raises(ConfigError, match=r"without --no-delays and delays=false, or with --delay"):
        sweep([BASE], ["delays=false", "delays.start_s=1,100"])
    with pytest.raises(ConfigError, match=r"delays\.start_s: '-1', expected 0 to"):
        sweep([BASE], ["delays.start_s=-1", "delays=false,true"])


@pytest.mark.parametrize("text", ["oracle=true,1", "delays=0,False", "oracle=True,true,0"])
def test_yes_and_no_are_the_same_as_numbers(text: str) -> None:
    """Else the same run would be played twice under two names."""
    with pytest.raises(ConfigError, match="a value is given twice"):
        sweep([BASE], [text])
    assert len(sweep([BASE], ["oracle=true,0"])) == 2


def test_a_key_is_swept_once() -> None:
    """Twice would make rows that look alike."""
    with pytest.raises(ConfigError, match="elastic is given twice"):
        sweep([BASE], ["elastic=0", "elastic=1"])


def test_the_last_key_turns_fastest_and_no_key_changes_nothing() -> None:
    """Every combination once, all tasks at each."""
    assert sweep([BASE], []) == [BASE]
    made = sweep([BASE, structs.replace(BASE, seed=2)], ["elastic=0,1", "loss=0,0.1"])
    assert [(task.swept["elastic"], task.swept["loss"], task.seed) for task in made] == [
        (elastic, loss, seed) for elastic in "01" for loss in ("0", "0.1") for seed in (1, 2)
    ]
    assert parse_sweep(" a = 1, 2 ") == ("a", ("1", "2"))
    assert parse_sweep("workload=1,1.0") == ("workload", ("1", "1.0"))  # names of files


def test_a_trace_file_has_no_generator() -> None:
    """Its jobs are what they are."""
    with pytest.raises(ConfigError, match="a trace file has no generator's parameters"):
        vary(BASE, "workload.load", "0.9").read()


# --- rows ---------------------------------------------------------------------------------------


def test_rows_carry_what_was_swept(simulate: Simulate) -> None:
    """JSON, table and CSV tell the values beside the figures, which differ by them."""
    args = ("--policy", "aryl-elastic", "--sweep", "elastic=0,0.5", "--seeds", "1..2")
    runs = json.loads(simulate(*args, "-o", "json").out)
    assert [run["swept"] for run in runs["runs"]] == [
        {"elastic": v} for v in ("0", "0", "0.5", "0.5")
    ]
    assert [row["swept"]["elastic"] for row in runs["means"]] == ["0", "0.5"]
    one, other = (row["figures"]["jct_s.mean"]["mean"] for row in runs["means"])
    assert one != other
    heading, *lines = simulate(*args).out.split("\n\n")[0].splitlines()
    assert heading.split()[:2] == ["POLICY", "ELASTIC"]
    assert [line.split()[:2] for line in lines] == [["aryl-elastic", "0"], ["aryl-elastic", "0.5"]]
    rows = list(csv.DictReader(io.StringIO(simulate(*args, "-o", "csv").out)))
    assert {row["elastic"] for row in rows} == {"0", "0.5"}


def test_the_way_to_the_bound_is_told_beside_knobs_that_are_swept(simulate: Simulate) -> None:
    """`sjf` is played once, as it can use none of them, and every row is measured from it."""
    args = ("--policy", "sjf,aryl-elastic", "--elastic", "0.5", "-o", "json")
    runs = json.loads(simulate(*args, "--sweep", "policy.resize_cost_s=0,600").out)["runs"]
    assert [run["policy"] for run in runs] == ["sjf", "aryl-elastic", "aryl-elastic"]
    assert [run["gap_closed_ratio"] is None for run in runs] == [False] * 3
    assert runs[0]["gap_closed_ratio"] == 0.0
    claims = json.loads(simulate(*args, "--sweep", "policy.claim_ratio=0,2").out)["runs"]
    assert all(run["gap_closed_ratio"] is not None for run in claims)


def test_the_page_has_a_line_for_each_value(tmp_path: Path, simulate: Simulate) -> None:
    """Values are part of the names of its plots."""
    file = tmp_path / "page.html"
    done = simulate("--policy", "sjf", "--sweep", "elastic=0,0.5", "--html", str(file))
    assert done.code == 0, done.err
    assert "sjf elastic=0<" in file.read_text()
    assert "sjf elastic=0.5<" in file.read_text()


def test_an_unknown_key_ends_the_command_with_the_list(simulate: Simulate) -> None:
    """Exit code 2 and no traceback."""
    done = simulate("--sweep", "elastc=0.1")
    assert done.code == 2
    assert "'elastc' is not one of" in done.err
    assert "policy.resize_cost_s" in done.err


def result(policy: str, seed: int, jct_s: float, **swept: str) -> RunResult:
    """A result that differs in one figure."""
    return RunResult(
        policy=policy,
        seed=seed,
        swept=swept,
        jct_s=Quantiles(mean=jct_s),
        queueing_s=Quantiles(),
        jobs=1,
        training_gpu_ratio=0.0,
        overall_gpu_ratio=0.0,
        on_loan_gpu_ratio=0.0,
        preemptions=0,
        preempted_jobs_ratio=0.0,
        lost_gpu_s=0.0,
        reclaims=0,
        reclaims_late=0,
        jct_bound_s=0.0,
        events=0,
        wall_s=0.0,
        peak_rss_bytes=0,
    )


def test_means_are_over_seeds_and_never_over_values() -> None:
    """Each value has its own mean; so has each policy."""
    rows = means(
        [
            result("a", 1, 1.0, x="1"),
            result("a", 2, 3.0, x="1"),
            result("a", 1, 10.0, x="2"),
            result("b", 1, 5.0, x="1"),
        ]
    )
    assert [(label(row), row.seeds, row.figures["jct_s.mean"].mean) for row in rows] == [
        ("a x=1", 2, 2.0),
        ("a x=2", 1, 10.0),
        ("b x=1", 1, 5.0),
    ]
