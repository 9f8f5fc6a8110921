"""Cutting the packaged slices: the rules of ORIGIN.md on traces of the test's own, and for real."""

from __future__ import annotations

import gzip
import os
from pathlib import Path

import pytest

from coordinator.demo import cut
from coordinator.demo.traces import (
    JOB_SLICE,
    LOAD_SLICE,
    TRACES_VARIABLE,
    read_jobs,
    read_load,
)
from coordinator.workloads.records import LoadSeries, TraceJob

DATA = Path(cut.__file__).with_name("data")
START_S = cut.JOB_START_S


def job(submit_s: float, *, duration_s: float = 600.0, gpus: int = 1) -> TraceJob:
    return TraceJob(job_id="j", submit_s=submit_s, duration_s=duration_s, gpus=gpus)


def write_jobs(path: Path, jobs: list[TraceJob]) -> Path:
    """A file as elasticflow-traces has them."""
    rows = [f"{job.submit_s:.0f},{job.duration_s:.0f},{job.gpus}\n" for job in jobs]
    path.write_text("submission_time,duration,num_gpu\n" + "".join(rows))
    return path


def write_load(path: Path, *, steps: int) -> Path:
    """Ten-minute rates of two models, as ServeGen's clients add up."""
    rows = [
        f"{model},{600 * step},{factor * (1 + step % 7)}\n"
        for model, factor in (("m-large", 100), ("m-small", 10))
        for step in range(steps)
    ]
    path.write_text("model,t_s,req_per_s\n" + "".join(rows))
    return path


def test_clusters_are_merged_by_time_and_filtered_before_they_are_counted() -> None:
    """Too short, too long, too large and too early jobs take none of the places."""
    first = [job(START_S - 1), job(START_S + 30), job(START_S + 10, duration_s=10.0)]
    second = [job(START_S + 20), job(START_S + 5, gpus=17), job(START_S + 6, duration_s=20_000.0)]
    found = cut.cut_jobs([first, second])
    assert [found_job.submit_s for found_job in found] == [0.0, 10.0]


def test_no_more_jobs_are_taken_than_the_rule_says() -> None:
    """The first ones in time, whatever cluster they are of."""
    many = [job(START_S + number) for number in range(cut.JOB_LIMIT)]
    found = cut.cut_jobs([many, [job(START_S + 0.5)]])
    assert len(found) == cut.JOB_LIMIT
    assert found[1].submit_s == 0.5


def test_a_day_of_load_begins_at_zero() -> None:
    """The steps from the start on, as many as a day has, with their own rates."""
    first = int(cut.LOAD_START_S // 600)
    values = tuple(map(float, range(first + 500)))
    rows = cut.cut_load(LoadSeries(name="x", values=values, step_s=600.0))
    assert len(rows) == cut.LOAD_STEPS
    assert rows[0] == (0.0, float(first))
    assert rows[-1][0] == 600.0 * (cut.LOAD_STEPS - 1)


def test_what_was_cut_is_what_the_demo_reads(tmp_path: Path) -> None:
    """Both files are written, in the columns of the packaged ones, and read back the same."""
    jobs = [job(START_S + 7 * number, gpus=1 + number % 16) for number in range(20)]
    first = write_jobs(tmp_path / "cluster02.csv", jobs[::2])
    second = write_jobs(tmp_path / "cluster04.csv", jobs[1::2])
    load = write_load(tmp_path / "rates.csv", steps=300)
    into = ("--into", str(tmp_path))
    assert cut.main(["--jobs", str(first), str(second), "--load", str(load), *into]) == 0
    read = read_jobs(tmp_path / JOB_SLICE)
    assert [found.gpus for found in read] == [found.gpus for found in jobs]
    assert read_load(tmp_path / LOAD_SLICE).step_s == 600.0
    for name in (JOB_SLICE, LOAD_SLICE):
        header = (DATA / name).read_text().splitlines()[0]
        assert (tmp_path / name).read_text().splitlines()[0] == header


def test_a_trace_that_cannot_be_read_writes_nothing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Exit status 1, the file and the column in the error; the old slices stay."""
    good = write_jobs(tmp_path / "cluster02.csv", [job(START_S)])
    bad = tmp_path / "rates.csv"
    bad.write_text("t_s,req_per_s\n0,many\n600,1\n")
    into = tmp_path / "into"
    into.mkdir()
    assert cut.main(["--jobs", str(good), "--load", str(bad), "--into", str(into)]) == 1
    said = capsys.readouterr().err
    assert "rates.csv: line 2: column req_per_s" in said
    assert list(into.iterdir()) == []


def find_traces() -> tuple[list[Path], Path]:
    """The published files that the packaged slices were cut from; skips where they are not."""
    root = os.environ.get(TRACES_VARIABLE)
    if not root:
        pytest.skip(f"{TRACES_VARIABLE} does not name the directory of published traces")
    names = [f"cluster{number:02d}.csv.gz" for number in (2, 4, 6)]
    jobs = [path for name in names for path in Path(root).rglob(name)]
    loads = list(Path(root).rglob("aggregate_rate_10min.csv*"))
    if len(jobs) != len(names) or not loads:
        pytest.skip(f"{TRACES_VARIABLE} has no {', '.join(names)} or aggregate_rate_10min.csv")
    return jobs, loads[0]


@pytest.mark.slow
def test_the_packaged_slices_are_what_the_published_traces_give(tmp_path: Path) -> None:
    """Byte for byte: nobody has touched the data since, nor the rules."""
    jobs, load = find_traces()
    words = ["--jobs", *map(str, jobs), "--load", str(load), "--into", str(tmp_path)]
    assert cut.main(words) == 0
    for name in (JOB_SLICE, LOAD_SLICE):
        assert (tmp_path / name).read_bytes() == (DATA / name).read_bytes()


def test_published_files_may_be_packed(tmp_path: Path) -> None:
    """`.gz` is unpacked on the way."""
    plain = write_jobs(tmp_path / "cluster02.csv", [job(START_S), job(START_S + 1)])
    packed = tmp_path / "cluster02.csv.gz"
    packed.write_bytes(gzip.compress(plain.read_bytes()))
    assert read_jobs(packed) == read_jobs(plain)
