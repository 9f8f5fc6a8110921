"""What a person writes, and the one clear error for each mistake."""

from __future__ import annotations

import warnings
from itertools import combinations
from pathlib import Path

import pytest
from msgspec import structs

from common.errors import ConfigError
from common.model import NodeName, Pool, ServiceName
from coordinator.sim.inputs.inputs import (
    Shares,
    node_specs,
    parse_cluster,
    parse_crash,
    parse_seeds,
    read_workload,
)
from coordinator.sim.run.build import RunOptions, Stage
from coordinator.sim.run.outages import Crash
from coordinator.workloads.paper import PaperParameters
from coordinator.workloads.pools import gpu_types, node_sizes
from coordinator.workloads.records import NodeGroup, TraceJob
from tests.tables import each_row

SHARES = Shares.__struct_fields__
SLICE = Path(__file__).parents[2] / "data" / "sim" / "itp_slice.csv"
TRACES = Path(__file__).parents[2] / "data" / "traces"


def test_a_shape_is_training_plus_inference() -> None:
    """`443x8+520x8` is nodes x GPUs of both pools."""
    assert parse_cluster("443x8+520x4") == (
        NodeGroup(count=443, gpus=8, gpu_type="V100"),
        NodeGroup(count=520, gpus=4, gpu_type="T4", home_pool=Pool.INFERENCE),
    )


@pytest.mark.parametrize("text", ["1x64", "1x64+0x8"])
def test_an_absent_pool_has_no_nodes(text: str) -> None:
    """Without inference nodes there is nothing to lend."""
    assert parse_cluster(text) == (NodeGroup(count=1, gpus=64, gpu_type="V100"),)


@each_row("text", ["8", "x8", "8x8+", "0x8+5x8", "8x0", "443X8", "nowhere.toml"])
def test_a_bad_cluster_says_what_was_expected(text: str) -> None:
    """The error names the text and the shapes that are taken."""
    with pytest.raises(ConfigError) as caught:
        parse_cluster(text)
    assert str(caught.value).startswith(f"cluster {text}: ")
    assert "NODESxGPUS" in str(caught.value)


def test_a_cluster_file_lists_groups(tmp_path: Path) -> None:
    """TOML tables with the fields of a group of nodes."""
    file = tmp_path / "cell.toml"
    file.write_text(
        '[[nodes]]\ncount = 2\ngpus = 8\ngpu_type = "H100"\n'
        '[[nodes]]\ncount = 1\ngpus = 4\ngpu_type = "L4"\nhome_pool = "inference"\n'
    )
    groups = parse_cluster(str(file))
    assert [(group.count, group.gpu_type) for group in groups] == [(2, "H100"), (1, "L4")]
    assert gpu_types(groups) == (("H100",), "L4")
    assert node_sizes(groups).gpus_for((), 16) == 8


@pytest.mark.parametrize("text", ["[[nodes]]\ncount = 2\n", "nodes = 3\n", "[[nodes"])
def test_a_broken_cluster_file_is_named(tmp_path: Path, text: str) -> None:
    """Whatever is wrong in it, the error begins with its path."""
    file = tmp_path / "cell.toml"
    file.write_text(text)
    with pytest.raises(ConfigError, match=r"cell\.toml: "):
        parse_cluster(str(file))


def test_an_openb_node_list_is_a_cluster() -> None:
    """Published node lists are read as they are."""
    groups = parse_cluster(str(TRACES / "openb_nodes.csv"))
    assert sum(group.count * group.gpus for group in groups) > 0


def test_inference_nodes_are_dealt_to_the_services() -> None:
    """Each service has its own nodes, as equally many as can be."""
    names = (ServiceName("a"), ServiceName("b"))
    specs = node_specs(parse_cluster("1x8+5x8"), names)
    assert [spec.service for spec in specs] == [None, "a", "a", "a", "b", "b"]
    assert [spec.name for spec in specs][:2] == ["t00000", "i00000"]


def test_a_trace_begins_with_its_first_job() -> None:
    """Its own clock is moved, its length is the span of submissions."""
    found = read_workload(str(SLICE), cluster="1x64")
    assert found.name == "itp_slice"
    assert found.jobs[0].submit_s == 0.0
    assert found.length_s == found.jobs[-1].submit_s


@each_row(
    ("row", "column"),
    [
        ("0,10,8,H100", "gpu_types"),
        ("0,10,800,A100|H100", "gpu_types"),
        ("0,10,800,V100", "gpus"),
        ("0,10,800,H100|V100", "gpus"),
        ("0,10,800,", "gpus"),
    ],
)
def test_what_never_fits_is_blamed_on_the_column_that_says_it(
    tmp_path: Path, row: str, column: str
) -> None:
    """A type that the cluster has not is no fault of the size, whatever that is."""
    file = tmp_path / "t.csv"
    file.write_text(f"submit_s,duration_s,gpus,gpu_types\n{row}\n")
    with pytest.raises(ConfigError, match=rf"t\.csv: line 2: column {column}: job 1: .* never fit"):
        Stage(read_workload(str(file), cluster="2x8"), RunOptions(policy="fifo"))


def test_a_directory_is_no_cluster(tmp_path: Path) -> None:
    """It is there, so that nobody is told that there is no such file."""
    with pytest.raises(ConfigError, match=f"^cluster {tmp_path}: {tmp_path} is a directory, exp"):
        parse_cluster(str(tmp_path))


def test_a_node_that_is_not_there_is_told_which_are(tmp_path: Path) -> None:
    """One range for each pool, as no name is between the last of one and the first of the other."""
    file = tmp_path / "t.csv"
    file.write_text("submit_s,duration_s,gpus\n0,10,1\n")
    options = RunOptions(policy="fifo", crashes=(parse_crash("t00009@1+1"),))
    with pytest.raises(
        ConfigError, match=r"t00009; there are t00000 to t00001 and i00000 to i0000"
    ):
        Stage(read_workload(str(file), cluster="2x8+4x8"), options)


@each_row(
    "changed",
    [
        {"load": 10.0},
        {"rare_load": 100.0},
        {"gang_s": 1e8, "gangs": 200},
        {"short_share": 1e-9},
        {"short_share": 5e-324},
        {"longest_s": 82_000.0},
    ],
)
def test_generator_values_that_fit_no_trace_are_named(changed: dict[str, float]) -> None:
    """All that were changed, with what is wrong; and the arithmetic warns of nothing by itself."""
    parameters = structs.replace(PaperParameters(), **changed)
    told = ", ".join(f"{name}={value}" for name, value in sorted(changed.items()))
    with warnings.catch_warnings(), pytest.raises(ConfigError) as caught:
        warnings.simplefilter("error")
        read_workload("paper", parameters=parameters)
    named = str(caught.value).removeprefix("workload paper: no trace comes of ").split(": ")[0]
    assert ", ".join(sorted(named.split(", "))) == told


def test_a_directory_is_no_workload(tmp_path: Path) -> None:
    """It is there, so that nobody is told that it is not."""
    with pytest.raises(ConfigError, match=r"^trace .*: .* is a directory, expected a file$"):
        read_workload(str(tmp_path), cluster="1x8")


def test_a_trace_needs_a_cluster() -> None:
    """It tells none, and none is guessed."""
    with pytest.raises(ConfigError, match="add --cluster"):
        read_workload(str(SLICE))


def test_an_unknown_workload_is_neither_name_nor_file() -> None:
    """The error says what was looked for."""
    with pytest.raises(ConfigError, match=r"trace papr: no such file"):
        read_workload("papr", cluster="1x8")


def test_a_bad_trace_is_named_with_line_and_column(tmp_path: Path) -> None:
    """The reader's own error comes through."""
    file = tmp_path / "bad.csv"
    file.write_text("job_id,submit_s,duration_s,gpus\na,0,-5,1\n")
    with pytest.raises(ConfigError, match=r"bad\.csv: line 2: column duration_s: -5"):
        read_workload(str(file), cluster="1x8")


def test_a_load_file_stands_in_for_the_own_load() -> None:
    """`FILE:SERIES` picks one of several, and it begins with the run."""
    file = TRACES / "servegen_aggregate.csv"
    with pytest.raises(ConfigError, match="several series"):
        read_workload(str(SLICE), cluster="1x64+2x8", load=str(file))
    found = read_workload(str(SLICE), cluster="1x64+2x8", load=f"{file}:m-mid")
    assert [(load.name, load.start_s) for load in found.loads] == [("m-mid", 0.0)]


def test_a_load_begins_with_the_run_whenever_its_file_does(tmp_path: Path) -> None:
    """A file that was cut out of a longer one begins at some later second."""
    file = tmp_path / "load.csv"
    file.write_text("t_s,busy_ratio\n900,0.2\n1200,0.3\n")
    [load] = read_workload(str(SLICE), cluster="1x64+2x8", load=str(file)).loads
    assert next(iter(load.samples())) == (0.0, 0.2)
    assert load.start_s == 0.0


AGGREGATE = str(TRACES / "servegen_aggregate.csv")


def test_several_loads_are_several_services() -> None:
    """Each with nodes of its own, under the name of its series or under one that is given."""
    loads = (f"{AGGREGATE}:m-mid", f"chat={AGGREGATE}:m-mid", f"code={AGGREGATE}:m-large")
    found = read_workload(str(SLICE), cluster="1x64+7x8", load=loads)
    assert [load.name for load in found.loads] == ["m-mid", "chat", "code"]
    assert found.loads[0].values == found.loads[1].values != found.loads[2].values
    stage = Stage(found, RunOptions(policy="fifo"))
    assert {name: len(nodes) for name, nodes in stage.nodes_of.items()} == {
        "m-mid": 3,
        "chat": 2,
        "code": 2,
    }


@each_row(
    ("loads", "said"),
    [
        ((f"{AGGREGATE}:m-mid",) * 2, "load: m-mid is given twice; NAME=FILE"),
        ((f"a={AGGREGATE}",), "several series, name one: m-large, m-mid"),
        (("a=nowhere.csv",), r"load nowhere\.csv: no such file"),
        (
            tuple(f"s{number}={AGGREGATE}:m-mid" for number in range(3)),
            "load: 3 services on 2 inference nodes, expected at least one node for each",
        ),
    ],
)
def test_services_that_cannot_be_are_one_clear_error(loads: tuple[str, ...], said: str) -> None:
    """Two of one name, a series that is not named, and one without a node."""
    with pytest.raises(ConfigError, match=said):
        read_workload(str(SLICE), cluster="1x64+2x8", load=loads)


def chosen(option: str, share: float | Shares, seed: int | None) -> frozenset[str]:
    """The jobs of the slice that the share of one kind falls on, alone or beside others."""
    shares = share
    if not isinstance(shares, Shares):
        shares = structs.replace(Shares(), **{option: share})
    found = read_workload(str(SLICE), seed=seed, cluster="8x8+8x8", shares=shares)

    def is_chosen(job: TraceJob) -> bool:
        fungible = len(job.gpu_types) > 1
        told = {
            "elastic": job.is_elastic, "fungible": fungible, "checkpoint": job.has_checkpoints
        }  # fmt: skip
        return told[option]

    return frozenset(job.job_id for job in found.jobs if is_chosen(job))


def test_shares_are_drawn_for_the_nodes_and_types_of_a_mixed_cluster(tmp_path: Path) -> None:
    """A base of 16 GPUs is two workers where most nodes have eight, and who names no type accepts
    all of training."""
    trace, cluster = tmp_path / "t.csv", tmp_path / "cell.toml"
    trace.write_text("submit_s,duration_s,gpus\n0,10,32\n")
    kinds = ((8, 8, "H100", "training"), (1, 32, "A100", "training"), (4, 8, "L4", "inference"))
    cluster.write_text(
        "".join(
            f'[[nodes]]\ncount = {count}\ngpus = {gpus}\ngpu_type = "{kind}"\n'
            f'home_pool = "{pool}"\n'
            for count, gpus, kind, pool in kinds
        )
    )
    for fungible, types in ((0.0, ("H100", "A100")), (1.0, ("H100", "A100", "L4"))):
        shares = Shares(elastic=1.0, fungible=fungible)
        [job] = read_workload(str(trace), cluster=str(cluster), shares=shares).jobs
        assert (job.gpus_per_worker, job.min_workers, job.max_workers) == (8, 2, 8)
        assert job.gpu_types == types
    cluster.write_text(cluster.read_text().replace("count = 8\ngpus = 8", "count = 16\ngpus = 4"))
    [job] = read_workload(str(trace), cluster=str(cluster), shares=Shares(elastic=1.0)).jobs
    assert (job.gpus_per_worker, job.min_workers, job.max_workers) == (4, 4, 16)


@pytest.mark.parametrize("option", SHARES)
def test_shares_are_drawn_by_seed(option: str) -> None:
    """The same seed chooses the same jobs, another seed others, 0 like any; none given is 1."""
    of_seed = [chosen(option, 0.3, seed) for seed in range(4)]
    assert len(set(of_seed)) == len(of_seed)
    assert all(len(ids) == round(0.3 * 240) for ids in of_seed)
    assert chosen(option, 0.3, 1) == of_seed[1] == chosen(option, 0.3, None)
    assert chosen(option, 0.1, 2) < of_seed[2] < chosen(option, 0.5, 2)


@each_row("seed", range(4))
@each_row(("one", "other"), [*combinations(SHARES, 2)])
def test_whom_one_share_falls_on_says_nothing_of_another(one: str, other: str, seed: int) -> None:
    """Of two shares of 30 % in one call, 9 % of the jobs have both."""
    shares = structs.replace(Shares(), **{one: 0.3, other: 0.3})
    both = chosen(one, shares, seed) & chosen(other, shares, seed)
    assert 9 <= len(both) <= 35  # of 240: 21.6, and a standard deviation of 3.3


def test_a_share_is_a_part_of_one() -> None:
    """The error names the option."""
    with pytest.raises(ConfigError, match=r"elastic: 1\.5, expected 0 to 1"):
        read_workload(str(SLICE), cluster="1x64", shares=Shares(elastic=1.5))


def test_a_crash_names_node_instant_and_length() -> None:
    """`t00001@3600+600` goes down after an hour for ten minutes."""
    expected = Crash(node=NodeName("t00001"), at_s=3600.0, down_s=600.5)
    assert parse_crash("t00001@3600+600.5") == expected


@each_row("text", ["t1", "t1@5", "@5+5", "t1@5+", "t1@-5+5"])
def test_a_bad_crash_shows_how_one_is_written(text: str) -> None:
    """The error has an example."""
    with pytest.raises(ConfigError, match=r"t00001@3600\+600"):
        parse_crash(text)


def test_seeds_are_ranges_and_lists() -> None:
    """Both ends of a range belong to it."""
    assert parse_seeds("1..3,7") == (1, 2, 3, 7)


@each_row("text", ["", "a", "3..1", "1,1", "1..", "-1"])
def test_bad_seeds_are_refused(text: str) -> None:
    """Nothing, no numbers, an empty range or a seed twice."""
    with pytest.raises(ConfigError, match=r"^seeds "):
        parse_seeds(text)
