"""Every published job format is recognized, in the right units; what is wrong is named exactly."""

from __future__ import annotations

import gzip
from pathlib import Path

import pytest
from msgspec import structs

from common.errors import ConfigError
from coordinator.workloads.formats import (
    TRACES_VARIABLE,
    find,
    from_first,
    parse_jobs,
    read_all_curves,
    read_curves,
    read_jobs,
    read_nodes,
    read_throughputs,
)
from coordinator.workloads.own import COLUMNS, job_lines
from coordinator.workloads.records import NodeGroup, TraceJob
from tests.tables import each_row

DATA = Path(__file__).parents[1] / "data" / "traces"
OWN = "submit_s,duration_s,gpus\n"
ITP = "job_id,submission_time,num_iteration,model_name,deadline,batch_size,num_gpu,duration\n"


@each_row("name", ["a,b", 'say "a"', '"', "a\rb", "a\nb", "a\r\nb"])
def test_a_field_that_would_end_early_is_quoted_and_read_as_it_was(name: str) -> None:
    """A comma, a quote or the end of a line within it; no other field is."""
    job = TraceJob(job_id="1", submit_s=0.0, duration_s=1.5, gpus=1, name=name, estimate_s=3.0)
    text = "".join(job_lines([job]))
    quoted = name.replace('"', '""')
    assert text.partition("\n")[2].startswith(f'1,0,1.5,1,trace,trace,"{quoted}",')
    assert parse_jobs("x", text).jobs == (job,)


@each_row(
    ("file", "format_name", "expected"),
    [
        (
            "elasticflow_traces.csv",
            "elasticflow-traces",
            {"submit_s": 16566, "duration_s": 3890, "gpus": 4, "model": "bert", "deadline_s": 4781},
        ),
        (
            "elasticflow.csv",
            "elasticflow",
            {"submit_s": 3715485, "duration_s": 5644, "gpus": 1, "batch_size": 4096},
        ),
        ("philly.csv", "philly", {"duration_s": 2240194, "gpus": 8, "tenant": "vc_7f04ca"}),
        ("tiresias.csv", "tiresias", {"job_id": "0", "duration_s": 164, "iterations": 606}),
        (
            "shockwave.trace",
            "shockwave",
            {"duration_s": 1418, "gpus": 1, "model": "LM", "batch_size": 10, "deadline_s": None},
        ),
        ("gavel.trace", "gavel", {"gpus": 4, "model": "ResNet-18", "iterations": 925982}),
    ],
)
def test_a_published_format_is_recognized(
    file: str, format_name: str, expected: dict[str, object]
) -> None:
    """The first row of each slice, in seconds and whole GPUs, deadlines from the submission."""
    trace = read_jobs(DATA / file)
    assert trace.format == format_name
    first = structs.asdict(trace.jobs[0])
    assert {name: first[name] for name in expected} == expected


def test_philly_times_are_seconds_apart() -> None:
    """Wall times differ as the calendar says."""
    jobs = from_first(read_jobs(DATA / "philly.csv").jobs)
    assert [job.submit_s for job in jobs] == [0, 235_696, 257_229]


def test_chronus_counts_in_minutes_and_is_put_in_order() -> None:
    """Submission, duration and deadline are minutes in the file; its rows are not sorted."""
    trace = read_jobs(DATA / "chronus.csv", skip_zero_gpus=True)
    assert [job.job_id for job in trace.jobs] == ["2", "0", "1"]
    first = trace.jobs[0]
    assert (first.submit_s, first.duration_s, first.deadline_s) == (431_940, 6_360, 14_460)
    assert trace.skipped_zero_gpus == 1


def test_of_several_deadlines_the_last_counts_and_best_effort_has_none() -> None:
    """Chronus writes soft deadlines with a dash between them."""
    header = (DATA / "chronus.csv").read_text().splitlines()[0]
    rows = "1,vc,1,0,10,bert,5,1,20-40,9-1,0,soft\n2,vc,1,0,10,bert,5,1,20,9,1,best\n"
    jobs = parse_jobs("t", f"{header}\n{rows}").jobs
    assert [job.deadline_s for job in jobs] == [2_400, None]


def test_a_digit_that_is_no_number_is_one_clear_error() -> None:
    """A superscript counts as a digit and is none to calculate with."""
    header = (DATA / "chronus.csv").read_text().splitlines()[0]
    row = "1,vc,1,0,10,bert,5,1,20-\u00b2,9,0,soft\n"
    with pytest.raises(ConfigError, match=r"line 2: column expect_time_list: .* whole number of"):
        parse_jobs("t", f"{header}\n{row}")


def test_gavel_steps_become_seconds_by_the_throughput_of_the_job_alone(tmp_path: Path) -> None:
    """925,982 steps at 69.95 a second; without the file beside it there is no duration."""
    jobs = read_jobs(DATA / "gavel.trace").jobs
    assert jobs[0].duration_s == pytest.approx(925_982 / 69.95051766177759)
    slower = read_throughputs(DATA / "simulation_throughputs.json", worker="k80")
    k80 = read_jobs(DATA / "gavel.trace", throughputs=slower).jobs
    assert k80[0].duration_s > 9 * jobs[0].duration_s
    with pytest.raises(ConfigError, match=r"line 1: column job type: no throughput of 'ResNet-18"):
        read_jobs(DATA / "gavel.trace", throughputs={})
    lonely = tmp_path / "gavel.trace"
    lonely.write_bytes((DATA / "gavel.trace").read_bytes())
    with pytest.raises(ConfigError, match="simulation_throughputs"):
        read_jobs(lonely)
    with pytest.raises(ConfigError, match="column a100: missing; there are: v100, k80"):
        read_throughputs(DATA / "simulation_throughputs.json", worker="a100")


def test_openb_pods_without_gpu_or_run_are_counted() -> None:
    """A pod runs from its scheduling to its deletion; fractions of a GPU are kept beside it."""
    trace = read_jobs(DATA / "openb_pods.csv", skip_zero_gpus=True)
    assert (len(trace.jobs), trace.skipped_zero_gpus, trace.skipped_not_run) == (6, 1, 1)
    assert trace.jobs[1].gpu_share == 0.46
    assert trace.jobs[5].duration_s == 11_815_163 - 3_019_331


def test_openb_nodes_are_grouped() -> None:
    """Alike nodes are one group; those without a GPU are counted or refused."""
    groups, skipped = read_nodes(DATA / "openb_nodes.csv", skip_zero_gpus=True)
    assert groups == (
        NodeGroup(count=2, gpus=8, gpu_type="G2", cpus=96, memory_bytes=393_216 * 2**20),
        NodeGroup(count=2, gpus=4, gpu_type="V100M16", cpus=32, memory_bytes=131_072 * 2**20),
    )
    assert skipped == 1
    with pytest.raises(ConfigError, match="line 2: column gpu: 0, expected at least 1"):
        read_nodes(DATA / "openb_nodes.csv")


def test_a_published_history_of_attained_service_is_no_trace() -> None:
    """Tiresias' list for Gittins is one number per line, and says nothing of when jobs came."""
    with pytest.raises(ConfigError, match="line 1: column duration: stands alone: a history"):
        read_jobs(DATA / "tiresias_service.csv")


def test_a_scaling_curve_holds_what_was_measured() -> None:
    """Sizes without a number are left out; between sizes the line counts, beyond them nothing."""
    [curve] = read_curves(DATA / "yolov3.csv", gpu_type="T4")
    assert [gpus for gpus, _ in curve.points] == [1, 2, 4, 8, 16]
    assert curve.iterations_per_s(2) == 0.828799432511257
    between = (0.828799432511257 + 1.3152121172616016) / 2
    assert curve.iterations_per_s(3) == pytest.approx(between)
    with pytest.raises(ValueError, match=r"measured 1\.\.16"):
        curve.iterations_per_s(32)


def test_curves_of_a_directory_are_known_by_model_and_batch_size(tmp_path: Path) -> None:
    """A directory is named by its GPU type; an empty one is an error."""
    directory = tmp_path / "throughputs_T4"
    directory.mkdir()
    with pytest.raises(ConfigError, match="no scaling curves"):
        read_all_curves(directory)
    (directory / "yolov3.csv").write_bytes((DATA / "yolov3.csv").read_bytes())
    curves = read_all_curves(directory)
    assert {key: curve.gpu_type for key, curve in curves.items()} == {("yolov3", 64): "T4"}


def test_our_own_format_comes_back_byte_for_byte() -> None:
    """What is written is read as the same jobs, and written again as the same bytes."""
    jobs = (
        TraceJob(job_id="a", submit_s=0.5, duration_s=10, gpus=4, name='x,"y"', gpu_share=0.46),
        TraceJob(
            job_id="b",
            submit_s=7,
            duration_s=1e6 / 3,
            gpus=8,
            tenant="ml",
            user="ann",
            model="bert",
            gpus_per_worker=4,
            min_workers=1,
            max_workers=4,
            gpu_types=("V100", "T4"),
            deadline_s=99,
            estimate_s=5.5,
            iterations=12,
            batch_size=64,
            heterogeneous_speed_ratio=0.7,
            has_checkpoints=True,
            priority=-2,
            app="search",
            cpus=96,
            memory_bytes=2**38,
        ),
    )
    text = "".join(job_lines(jobs))
    read = parse_jobs("own", text)
    assert read.jobs == jobs
    assert "".join(job_lines(read.jobs)) == text
    assert text.splitlines()[0] == ",".join(COLUMNS)
    plain = "".join(job_lines(jobs[:1]))
    assert plain.splitlines()[0] == ",".join(COLUMNS[:-3])  # as traces were written before


def test_three_columns_are_enough() -> None:
    """Jobs without an id are known by their row."""
    [job] = parse_jobs("own", OWN + "0,10,1\n").jobs
    assert job == TraceJob(job_id="1", submit_s=0, duration_s=10, gpus=1)


@each_row(
    ("text", "said"),
    [
        ("", "line 1: column 1: empty file"),
        (OWN, "line 2: column submit_s: no rows, expected at least one"),
        (OWN + "0,x,1\n", "line 2: column duration_s: 'x' is not a number"),
        (OWN + "\n0,nan,1\n", "line 3: column duration_s: 'nan' is not a number"),
        (OWN + "0,inf,1\n", "line 2: column duration_s: 'inf' is not a number"),
        (OWN + "nan,1,1\n", "line 2: column submit_s: 'nan' is not a number"),
        (OWN + "0,-1,1\n", "line 2: column duration_s: -1, expected at least 0"),
        (OWN + "0,1,1.5\n", "line 2: column gpus: '1.5' is not a whole number"),
        (OWN + "0,1,-4\n", "line 2: column gpus: -4, expected at least 0"),
        (OWN + "0,1,0\n", "line 2: column gpus: 0, expected at least 1"),
        (OWN + "0,1,0\n", "--skip-zero-gpus leaves these rows out"),
        (OWN + "0,1_00,1\n", "line 2: column duration_s: '1_00' is not a number"),
        (OWN + "0,1,1_0\n", "line 2: column gpus: '1_0' is not a whole number"),
        (OWN + "0,\u0663,1\n", "line 2: column duration_s: '\u0663' is not a number"),
        ("duration\n5\n6\n", "line 1: column duration: stands alone: a history of attained"),
        (OWN + "0,1\n", "line 2: column gpus: missing"),
        (OWN + "0,1,1,1\n", "line 2: column 4: 4 values, expected 3"),
        ("submit_s,gpus\n0,1\n", "line 1: column duration_s: missing"),
        ("submit_s,submit_s,gpus\n", "line 1: column submit_s: is given twice"),
        ("submit_s,duration_s,gpus,gpu\n0,1,1,1\n", "line 1: column gpu: unknown"),
        ("submit_s,duration_s,gpus,min_workers\n0,1,1,1\n", "column max_workers: min_workers and"),
        (
            "submit_s,duration_s,gpus,min_workers,max_workers\n0,1,1,2,1\n",
            "line 2: column max_workers: 1, expected at least min_workers, 2",
        ),
        ("submit_s,duration_s,gpus,gpu_share\n0,1,1,1.5\n", "column gpu_share: 1.5, expected at"),
        ("submit_s,duration_s,gpus,has_checkpoints\n0,1,1,yes\n", "'yes', expected true or false"),
        (
            "job_id,submit_s,duration_s,gpus\na,0,1,1\na,1,1,1\n",
            "line 3: column job_id: a is given twice",
        ),
        ("a,b\n1,2\n", "line 1: column a: no known trace begins so"),
        (ITP.replace(",deadline", ""), "line 1: column deadline: missing from a trace in elastic"),
        (ITP + "j,10,1,m,9,64,1,5\n", "line 2: column deadline: 9 is before the submission, 10"),
        ("a\tb\tc\n", "line 1: column 3: the last one, expected 10 (gavel) or 12 (shockwave)"),
        (
            'submit_s,duration_s,gpus\n0,"1\n',
            "line 2: column duration_s: no CSV, are its quotes closed?",
        ),
    ],
)
def test_a_bad_trace_is_named_to_the_column(tmp_path: Path, text: str, said: str) -> None:
    """One error, with file, line, column, what stood there and what was expected."""
    path = tmp_path / "jobs.csv"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        read_jobs(path)
    assert str(caught.value).startswith(f"{path}: ")
    assert said in str(caught.value)


def test_rows_without_a_gpu_can_be_skipped_and_are_counted() -> None:
    """Nothing of such a row is looked at."""
    trace = parse_jobs("own", OWN + "0,1,0\n0,nan,0\n3,1,2\n", skip_zero_gpus=True)
    assert ([job.gpus for job in trace.jobs], trace.skipped_zero_gpus) == ([2], 2)


def test_a_trace_of_nothing_but_such_rows_has_no_jobs(tmp_path: Path) -> None:
    """Skipping all of a trace is one clear error too."""
    path = tmp_path / "jobs.csv"
    path.write_text(OWN + "0,1,0\n5,1,0\n")
    with pytest.raises(ConfigError) as caught:
        read_jobs(path, skip_zero_gpus=True)
    assert f"{path}: line 1: column gpus: no job is left: 2 rows have no GPU" in str(caught.value)


def test_each_job_is_known_by_its_line() -> None:
    """Errors about a job's size, which come later, lead to its place too."""
    trace = parse_jobs("own", OWN + "0,1,0\n0,1,1\n\n3,1,2\n", skip_zero_gpus=True)
    assert [trace.lines[job.job_id] for job in trace.jobs] == [3, 5]
    assert trace.gpus_column == "gpus"


def test_a_cut_off_gzip_names_the_last_line_that_can_be_read(tmp_path: Path) -> None:
    """Half a download is an error, not half a trace; so is a damaged byte."""
    text = OWN + "".join(f"{second},{second * 7919 % 10007},1\n" for second in range(5_000))
    whole = gzip.compress(text.encode(), mtime=0)
    path = tmp_path / "jobs.csv.gz"
    path.write_bytes(whole)
    assert len(read_jobs(path).jobs) == 5_000
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(ConfigError, match=r"jobs\.csv\.gz: line \d{3,4}: column \d+ .*compressed"):
        read_jobs(path)
    path.write_bytes(whole[:-8] + bytes(8))
    with pytest.raises(ConfigError, match=r"line 5002: column 1 .*CRC"):
        read_jobs(path)


def test_bytes_that_are_no_text_are_named(tmp_path: Path) -> None:
    """Line and byte of the first one that is not UTF-8."""
    path = tmp_path / "jobs.csv"
    path.write_bytes(OWN.encode() + b"0,\xff,1\n")
    with pytest.raises(ConfigError, match=r"line 2: column 3 \(bytes\): not UTF-8"):
        read_jobs(path)
    with pytest.raises(ConfigError, match="nowhere: No such file"):
        read_jobs(tmp_path / "nowhere")


def test_a_bare_name_is_looked_up_in_the_directory_of_traces(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The variable names the directory; an error says where was looked and what could be set."""
    (tmp_path / "a.csv").write_text(OWN)
    monkeypatch.delenv(TRACES_VARIABLE, raising=False)
    with pytest.raises(ConfigError, match=f"{TRACES_VARIABLE} may name"):
        find("a.csv")
    monkeypatch.setenv(TRACES_VARIABLE, str(tmp_path))
    assert find("a.csv") == tmp_path / "a.csv"
    with pytest.raises(ConfigError, match=r"trace b\.csv: no such file: b\.csv, .*b\.csv$"):
        find("b.csv")


def test_a_job_that_cannot_be_is_refused() -> None:
    """A record that exists is legal, whoever makes it."""
    good = TraceJob(job_id="a", submit_s=0, duration_s=1, gpus=1)
    for changes in (
        {"gpus": 0},
        {"duration_s": -1.0},
        {"duration_s": float("nan")},
        {"min_workers": 3, "max_workers": 2},
        {"min_workers": 3},
    ):
        with pytest.raises(ValueError, match="job a"):
            TraceJob(**(structs.asdict(good) | changes))
