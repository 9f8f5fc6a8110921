"""Numbers and files that no run could come to an end with: one clear error, nothing played."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from common.errors import ConfigError
from coordinator.sim.inputs.inputs import (
    MOST_SEEDS,
    RANGES,
    parse_cluster,
    parse_crash,
    parse_seeds,
    within,
)
from tests.cli.fake_cell import FakeCell, Run, aryl
from tests.sim.small import SLICE
from tests.tables import each_row

POOL = ("--workload", str(SLICE), "--cluster", "1x64", "--no-delays", "--policy", "fifo")


def simulate(*args: str) -> Run:
    """`aryl simulate ARGS`, with no cell anywhere."""
    return aryl(FakeCell({}), "simulate", *args)


# --- numbers ------------------------------------------------------------------------------------

SHARES = ("elastic", "fungible", "checkpoint-share")


@pytest.mark.slow
@each_row("option", [*RANGES, *SHARES])
@each_row("text", ["nan", "inf", "-inf", "-1", "1e300", "1_0x"])
def test_a_number_out_of_its_range_is_one_line_that_names_the_option(
    option: str, text: str
) -> None:
    """Nothing that is no number, and nothing that a run would never come to the end of."""
    done = simulate(*POOL, f"--{option}={text}")
    assert done.code == 2
    assert option in done.err
    assert "expected" in done.err or "should be a valid number" in done.err
    assert "Traceback" not in done.err
    assert done.out == ""


@each_row("option", RANGES)
def test_both_ends_of_a_range_belong_to_it(option: str) -> None:
    """And what is next to them does not."""
    low, high = RANGES[option]
    assert [within(option, value) for value in (low, high)] == [low, high]
    for value in (math.nextafter(low, -math.inf), math.nextafter(high, math.inf)):
        with pytest.raises(ConfigError, match=rf"^{option}: .*, expected a number from "):
            within(option, value)


@each_row(
    ("args", "said"),
    [
        (("--coalesce", "inf"), "coalesce: inf, expected a number from 0 to 86400"),
        (("--prerun", "inf"), "prerun: inf, expected a number from 1 to 1e+09"),
        (("--prerun", "0"), "prerun: 0, expected a number from 1 to 1e+09"),
        (("--pass-period", "0"), "pass-period: 0, expected a number from 0.001 to 86400"),
        (("--loss", "0.95"), "loss: 0.95, expected a number from 0 to 0.9"),
        (("--sweep", "coalesce=0,inf"), "coalesce: 'inf', expected a number from 0 to 86400"),
        (("--checkpoints", "inf"), "checkpoints: 'inf', expected trace, never, on-request or"),
        (("--checkpoints", "nan"), "checkpoints: 'nan', expected"),
        (("--checkpoints", "1e-300"), "checkpoints: '1e-300', expected"),
        (("--checkpoints", "1e300"), "checkpoints: '1e300', expected"),
        (("--restarts", "-1"), "'--restarts'"),
        (("--restarts", "1000001"), "'--restarts'"),
        (("--restarts", "nan"), "'--restarts'"),
        (("--seed", "-1"), "'--seed'"),
        (("--seed", "inf"), "'--seed'"),
        (("--cores", "0"), "'--cores'"),
        (("--seeds", "1..1000000000000"), "seeds 1..1000000000000: expected at most 10000"),
        (("--seeds", "1e9"), "seeds 1e9: expected a number, a range"),
        (("--crash", f"t00000@{'9' * 299}+5"), "crash t00000: 1e+299 s, expected at most 1e+09"),
        (("--crash", f"t00000@5+{'9' * 299}"), "crash t00000: 1e+299 s, expected at most 1e+09"),
        (("--crash", f"t00000@{'9' * 999}+5"), ": expected NODE@SECONDS+SECONDS"),
        (("--crash", "t00000@nan+5"), "crash t00000@nan+5: expected NODE@SECONDS+SECONDS"),
        (("--crash", "t00000@5+inf"), "crash t00000@5+inf: expected NODE@SECONDS+SECONDS"),
        (("--policy", "aryl:resize_cost_s=nan"), "resize_cost_s"),
        (("--policy", "aryl:resize_cost_s=-1"), "resize_cost_s"),
        (("--sweep", "policy.resize_cost_s=inf"), "resize_cost_s"),
        (("--sweep", "delays.start_s=inf"), "sweep: delays.start_s says nothing of a run without"),
        (
            ("--sweep", "workload.pass_period_s=0"),
            "workload.pass_period_s: '0': Expected `int` >= 1",
        ),
        (("--sweep", "workload.pass_period_s=-5"), "workload.pass_period_s: '-5': Expected `int`"),
        (("--sweep", "workload.elastic_ratio=1000000000"), "workload.elastic_ratio: '1000000000'"),
        (("--sweep", "workload.load=inf"), "workload.load: 'inf': Expected `float` <= 10"),
        (("--delays", "--sweep", "delays.start_s=inf"), "delays.start_s: 'inf', expected"),
        (("--delays", "--sweep", "delays.start_s=-1"), "delays.start_s: '-1', expected"),
    ],
)
def test_what_no_run_can_be_made_of_is_named(args: tuple[str, ...], said: str) -> None:
    """Each option says what it expects."""
    given: tuple[str, ...] = POOL if "--policy" not in args else POOL[:-2]
    if args[0] == "--delays":
        given = tuple(arg for arg in given if arg != "--no-delays")
    policy = ("--policy", "aryl") if "policy.resize_cost_s=inf" in args else ()
    done = simulate(*given, *policy, *args)
    assert done.code == 2
    assert said in " ".join(done.err.replace("\u2502", " ").split())
    assert "Traceback" not in done.err


def test_as_many_seeds_as_are_allowed_are_taken() -> None:
    """One more in all is an error, however they are written."""
    assert len(parse_seeds(f"1..{MOST_SEEDS}")) == MOST_SEEDS
    with pytest.raises(ConfigError, match="expected at most"):
        parse_seeds(f"0,1..{MOST_SEEDS}")


def test_a_crash_may_be_as_long_as_a_job() -> None:
    """The bound itself is allowed."""
    assert parse_crash("t1@5+1000000000").down_s == 1e9


# --- clusters -----------------------------------------------------------------------------------


@each_row(
    ("text", "said"),
    [
        ("100001x8", "100001 nodes, expected at most 100000"),
        ("60000x8+40001x8", "100001 nodes, expected at most 100000"),
        ("1x100001", "100001 GPUs of a node, expected at most 100000"),
        ("9" * 5_000 + "x8", "no such file and no shape"),
        ("\u0661x8", "no such file and no shape"),
        ("nanx8", "no such file and no shape"),
        ("-1x8", "no such file and no shape"),
    ],
)
def test_a_cluster_above_any_fleet_is_an_error(text: str, said: str) -> None:
    """Before a node of it is made."""
    with pytest.raises(ConfigError, match=rf"^cluster .*{said}"):
        parse_cluster(text)


GOOD = '[[nodes]]\ncount = 2\ngpus = 8\ngpu_type = "H100"\n'


@each_row(
    ("text", "said"),
    [
        (GOOD + "colour = 1\n", r"nodes\[0\].colour: unknown"),
        (GOOD + GOOD + "gpu = 1\n", r"nodes\[1\].gpu: unknown"),
        (GOOD + "\n[[node]]\n", r"node: unknown"),
        (GOOD.replace("= 2", "= -1"), r"nodes\[0\].count: .* >= 1"),
        (GOOD.replace("= 2", "= 0"), r"nodes\[0\].count: .* >= 1"),
        (GOOD.replace("= 2", "= 100001"), r"nodes\[0\].count: .* <= 100000"),
        (GOOD.replace("= 2", "= 2.5"), r"nodes\[0\].count: expected `int`"),
        (GOOD.replace("= 2", "= nan"), r"nodes\[0\].count: expected `int`"),
        (GOOD.replace("= 2", "= inf"), r"nodes\[0\].count: expected `int`"),
        (GOOD.replace("= 8", "= 0"), r"nodes\[0\].gpus: .* >= 1"),
        (GOOD.replace("H100", ""), r"nodes\[0\].gpu_type: .* length >= 1"),
        (GOOD + 'home_pool = "spare"\n', r"nodes\[0\].home_pool: invalid .* 'spare', expected "),
        (GOOD + "cpus = -1\n", r"nodes\[0\].cpus: .* >= 0"),
        (GOOD + "memory_bytes = -1\n", r"nodes\[0\].memory_bytes: .* >= 0"),
        (GOOD + "nodes_per_rack = 0\n", r"nodes\[0\].nodes_per_rack: .* >= 1"),
        ("[[nodes]]\ncount = 2\n", r"nodes\[0\].gpus: is required and missing"),
        ("", "nodes: is required and missing"),
        ("nodes = 3\n", "nodes: expected `array`"),
        (GOOD + "gpus = 4\n", r"not TOML: .*line 5"),
        ("[[nodes", r"not TOML: .*end of document"),
    ],
)
def test_a_cluster_file_names_the_key_that_is_wrong(tmp_path: Path, text: str, said: str) -> None:
    """With the file, and the line where it is no TOML."""
    file = tmp_path / "cell.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=rf"^{file}: {said}"):
        parse_cluster(str(file))


# --- sizes that a cluster makes -----------------------------------------------------------------


def test_a_range_that_a_job_could_not_have_had_here_is_named_with_its_place(tmp_path: Path) -> None:
    """Without `gpus_per_worker` a worker takes a node, and eight GPUs are one of them, not two."""
    file = tmp_path / "trace.csv"
    file.write_text("submit_s,duration_s,gpus,min_workers,max_workers\n0,9,2,1,2\n1,9,8,2,4\n")
    played = ("--workload", str(file), "--no-delays", "--policy", "fifo", "--backend", "sequential")
    done = simulate(*played, "--cluster", "4x8")
    assert done.code == 2
    place = f"{file}: line 3: column gpus: job 2: 8 GPUs are 1 x 8 on nodes of 8"
    assert place in done.err
    assert "expected 2 to 4 workers; gpus_per_worker" in done.err
    assert simulate(*played, "--cluster", "4x4").code == 0
