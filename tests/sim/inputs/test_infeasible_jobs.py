"""Jobs that no run comes to the end of: found before it, or told with the reason after it."""

from __future__ import annotations

from pathlib import Path

import pytest
from msgspec import structs

from common.clock import SystemClock
from common.errors import ConfigError
from coordinator.sim.inputs.inputs import read_tenants, read_workload
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.play import play
from coordinator.sim.run.stall_detection import UnfinishedError
from coordinator.workloads.records import LoadSeries, LoadUnit
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.tables import each_row

LOAD = Path(__file__).parents[3] / "coordinator" / "demo" / "data" / "servegen_m_small_day.csv"
HEAD = "submit_s,duration_s,gpus,tenant\n"
LIMIT = '[[tenants]]\nname = "a"\nguarantee_gpus = 2\nborrow_limit_gpus = 4\n'


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    return aryl(FakeCell({}), "simulate", "--backend", "sequential", *args)


def stage(directory: Path, rows: str, tenants: str, *, more: str = "") -> Stage:
    """What would be played: two nodes of eight GPUs. more: a column that the rows have, too."""
    trace, file = directory / "t.csv", directory / "tenants.toml"
    trace.write_text((HEAD.replace("tenant", f"tenant,{more}") if more else HEAD) + rows)
    file.write_text(tenants)
    options = RunOptions(policy="fifo", engine={"tenants": read_tenants(str(file))})
    return Stage(read_workload(str(trace), cluster="2x8"), options)


def test_a_job_beyond_its_tenant_s_limit_is_named_before_anything_is_played(
    tmp_path: Path,
) -> None:
    """With line and column, the tenant, and the limit; as one that the cluster has no room for."""
    with pytest.raises(ConfigError) as raised:
        stage(tmp_path, "0,100,2,a\n10,100,8,a\n20,100,2,b\n", LIMIT)
    said = str(raised.value)
    assert "t.csv: line 3: column gpus: job 2: " in said
    assert said.endswith(
        "needs 8 GPUs at one time, and tenant a may use 6: its guarantee of 2 and its borrow limit "
        "of 4"
    )


def test_no_policy_is_played_for_it(tmp_path: Path) -> None:
    """One line for all policies, of the job and not of a policy."""
    trace, file = tmp_path / "t.csv", tmp_path / "tenants.toml"
    trace.write_text(HEAD + "0,100,2,a\n10,100,8,a\n")
    file.write_text(LIMIT)
    given = ("--workload", str(trace), "--cluster", "2x8", "--tenants", str(file))
    done = simulate(*given, "--policy", "fifo,drf,philly")
    assert (done.code, done.out) == (2, "")
    [line] = [line for line in done.err.splitlines() if line.startswith("aryl: ")]
    assert "line 3: column gpus: job 2: can never run here" in line


@each_row(
    ("rows", "tenants"),
    [
        ("0,100,6,a\n", LIMIT),
        ("0,100,8,b\n", LIMIT),
        ("0,100,8,a\n", "tenants = []\n"),
        ("0,100,8,a\n", LIMIT.replace("borrow_limit_gpus = 4\n", "")),
        ("0,100,6,a\n", LIMIT + '[[tenants]]\nname = "b"\nguarantee_gpus = 8\n'),
    ],
)
def test_what_a_tenant_may_use_when_it_is_alone_is_played(
    tmp_path: Path, rows: str, tenants: str
) -> None:
    """Up to its limit, and without one as much as there is; others have limits of their own."""
    assert len(stage(tmp_path, rows, tenants).jobs) == 1


@pytest.mark.parametrize(
    ("tenants", "said"),
    [
        (
            LIMIT.replace("= 4", "= 14") + 'parent = "all"\n'
            '[[tenants]]\nname = "all"\nguarantee_gpus = 2\nborrow_limit_gpus = 4\n',
            "tenant all may use 6",
        ),
        (
            '[[tenants]]\nname = "b"\nguarantee_gpus = 12\nlend_limit_gpus = 2\n',
            "tenant a may use 6 of the 16 in this fleet: the lend limits of b keep",
        ),
    ],
)
def test_limits_of_others_count_where_they_hold_for_it(
    tmp_path: Path, tenants: str, said: str
) -> None:
    """A parent's, and what another keeps idle whoever waits."""
    with pytest.raises(ConfigError, match=said):
        stage(tmp_path, "0,100,8,a\n", tenants)


@pytest.mark.parametrize(("gpus", "is_played"), [(12, True), (13, False)])
def test_a_tenant_s_own_jobs_do_not_have_what_its_teams_keep(
    tmp_path: Path, gpus: int, *, is_played: bool
) -> None:
    """Of sixteen GPUs four are a team's that lends none: also jobs of its parent have the rest."""
    tenants = (
        '[[tenants]]\nname = "a"\nguarantee_gpus = 8\n'
        '[[tenants]]\nname = "team"\nparent = "a"\nguarantee_gpus = 4\nlend_limit_gpus = 0\n'
    )
    rows = f"0,100,{gpus},a,1\n"
    if is_played:
        assert len(stage(tmp_path, rows, tenants, more="gpus_per_worker").jobs) == 1
        return
    with pytest.raises(ConfigError, match="tenant a by its own jobs may use 12 of the 16 in this"):
        stage(tmp_path, rows, tenants, more="gpus_per_worker")


@pytest.mark.parametrize("load", [None, str(LOAD)])
def test_inference_nodes_are_room_where_there_is_a_load(tmp_path: Path, load: str | None) -> None:
    """Without one they lend nothing, and a tenant can only have the training nodes."""
    trace, file = tmp_path / "t.csv", tmp_path / "tenants.toml"
    trace.write_text(HEAD + "0,100,9,b\n")
    file.write_text('[[tenants]]\nname = "a"\nguarantee_gpus = 12\nlend_limit_gpus = 0\n')
    options = RunOptions(policy="aryl", engine={"tenants": read_tenants(str(file))})
    workload = read_workload(str(trace), cluster="2x8+2x8", load=load)
    if load is not None:
        assert len(Stage(workload, options).jobs) == 1
        return
    with pytest.raises(ConfigError, match="tenant b may use 4 of the 16 in this fleet"):
        Stage(workload, options)


def test_a_limit_is_held_against_the_type_that_takes_fewest_gpus(tmp_path: Path) -> None:
    """A job for both pools has twice its GPUs on one of them and may use six: on the other it
    runs."""
    trace, file = tmp_path / "t.csv", tmp_path / "tenants.toml"
    file.write_text(LIMIT)
    options = RunOptions(policy="fifo", engine={"tenants": read_tenants(str(file))})
    for gpus, is_within in ((4, True), (6, True), (7, False)):
        trace.write_text(f"submit_s,duration_s,gpus,tenant,gpu_types\n0,100,{gpus},a,V100|T4\n")
        workload = read_workload(str(trace), cluster="2x8+2x16")
        if is_within:
            [job] = Stage(workload, options).jobs
            assert job.spec.workers_on("T4").min * job.spec.gpus_per_worker == 2 * gpus
        else:
            with pytest.raises(ConfigError, match="needs 7 GPUs at one time"):
                Stage(workload, options)


GANG = "submit_s,duration_s,gpus,job_id,gpus_per_worker\n0,100,8,runs,8\n9,100,{gpus},gang,8\n"


@pytest.mark.parametrize(
    ("gpus", "min_serving", "is_played"), [(16, 1, True), (24, 1, False), (24, 0, True)]
)
def test_a_job_that_no_loan_will_ever_hold_is_named_before_anything_is_played(
    tmp_path: Path, gpus: int, min_serving: int, *, is_played: bool
) -> None:
    """A service keeps `min_serving` of its three nodes, so that a gang has two of them at most."""
    trace = tmp_path / "t.csv"
    trace.write_text(GANG.format(gpus=gpus))
    workload = read_workload(str(trace), cluster="1x8+3x8", load=str(LOAD))
    kept = {"min_serving": min_serving, "headroom_ratio": 0.0}
    options = RunOptions(policy="aryl", service=kept)
    if is_played:
        assert len(Stage(workload, options).jobs) == 2
        return
    with pytest.raises(ConfigError) as raised:
        Stage(workload, options)
    said = str(raised.value)
    assert "t.csv: line 3: column gpus: job gang: can never run here: " in said
    assert "lends at most 2 of its 3 nodes (min_serving is 1): room for 2 at one time" in said


T4 = "submit_s,duration_s,gpus,gpu_types,job_id\n0,100,8,,runs\n9,100,8,T4,wants-t4\n"
"""The second waits for inference GPUs, which nobody lends."""


def test_a_job_that_never_ended_is_told_with_its_policy_and_what_it_waits_for(
    tmp_path: Path,
) -> None:
    """The engine's own reason, with the jobs called as in the trace."""
    trace = tmp_path / "t.csv"
    trace.write_text(T4)
    workload = read_workload(str(trace), cluster="1x8+2x8")
    with pytest.raises(UnfinishedError) as raised:
        play(workload, RunOptions(policy="fifo"), clock=SystemClock())
    said = str(raised.value)
    assert said.startswith(
        "policy fifo: 1 of 2 jobs never ended on this cluster; the first is wants-t4, pending: "
    )
    assert "T4" in said.partition("pending: ")[2]


def test_who_is_in_the_way_is_called_as_in_the_trace(tmp_path: Path) -> None:
    """Not by the number that it has in the engine. Either could have the service's nodes, were it
    not busy for ever."""
    trace = tmp_path / "t.csv"
    head, *rows = T4.splitlines()
    rows.append("10,100,8,T4,before-it")
    text = "".join(f"{row},{100 * (row in rows[-1:])}\n" for row in rows)
    trace.write_text(f"{head},priority\n{text}")
    workload = read_workload(str(trace), cluster="1x8+8x8", load=str(LOAD))
    busy = LoadSeries(
        name=workload.loads[0].name, step_s=600.0, values=(1.0, 1.0), unit=LoadUnit.BUSY
    )
    always = structs.replace(workload, loads=(busy,))
    with pytest.raises(UnfinishedError, match=r"wants-t4, pending: behind before-it, "):
        options = RunOptions(policy="aryl:is_strict=true", idle_events=1000)
        play(always, options, clock=SystemClock())


def test_where_no_policy_ends_each_is_told(tmp_path: Path) -> None:
    """A line for each; one that was left out of several is told beside the others' figures."""
    trace = tmp_path / "t.csv"
    trace.write_text(T4)
    done = simulate("--workload", str(trace), "--cluster", "1x8+2x8", "--policy", "fifo,sjf")
    assert (done.code, done.out) == (2, "")
    lines = [line for line in done.err.splitlines() if "never ended" in line]
    assert len(lines) == 2
    assert lines[0].startswith("aryl: left out: policy fifo: ")
    assert lines[1].startswith("aryl: policy sjf: ")


@pytest.mark.slow
def test_a_policy_that_does_not_end_costs_the_others_nothing(tmp_path: Path) -> None:
    """Under one that lends the second job runs: its figures are told, and who was left out and
    why."""
    trace = tmp_path / "t.csv"
    trace.write_text(T4)
    given = ("--workload", str(trace), "--cluster", "1x8+8x8", "--load", str(LOAD))
    done = simulate(*given, "--policy", "fifo,aryl", "-o", "csv")
    assert done.code == 1
    assert [row.split(",")[:3:2] for row in done.out.splitlines()[1:]] == [
        ["aryl", "runs"],
        ["aryl", "wants-t4"],
    ]
    [line] = [line for line in done.err.splitlines() if line.startswith("aryl: left out: ")]
    assert line.startswith("aryl: left out: policy fifo makes no headway: 1 of 2 jobs ended, ")
    why = line.partition(
        "0 preemptions and 0 resizes; the first that is left is wants-t4, pending: "
    )
    assert "T4" in why[2]
    assert "checkpoints" not in line
