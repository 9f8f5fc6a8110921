"""The other examples, each as its job file says."""

from __future__ import annotations

import re

from tests.training.live import LiveCell


def test_lightning_resumes_from_its_last_checkpoint(cell: LiveCell) -> None:
    """It knows nothing of Aryl; a drained node costs it the steps since its last save, no more."""
    job = cell.submit("lightning", "--workers", "1:2", "--env", "STEPS=150")
    cell.wait("it trains", lambda: "step 30 of 2" in job.log())
    [node] = job.nodes(flexible=True)
    cell.aryl("node", "drain", node, "--yes")
    assert job.ends() == "succeeded", job.log()
    cell.aryl("node", "uncordon", node)
    steps = [(int(at), int(n)) for at, n in re.findall(r"step (\d+) of (\d)", job.log())]
    [resumed] = [i for i in range(1, len(steps)) if steps[i][1] != steps[i - 1][1]]
    assert steps[resumed][0] > steps[resumed - 1][0] - 30  # saves are 20 apart, lines 10


def test_a_gang_of_plain_workers_trains_and_resumes(cell: LiveCell) -> None:
    """Two ranks, no launcher; a drained node preempts both, and they go on from their save."""
    job = cell.submit("gang", "--env", "STEPS=300")
    cell.wait("it trains", lambda: "begins at step 0" in job.log() and job.state == "running")
    cell.aryl("node", "drain", "train-1", "--yes")
    cell.wait("all have left", lambda: job.state == "pending")
    cell.aryl("node", "uncordon", "train-1")
    assert job.ends() == "succeeded", job.log()
    [step] = re.findall(r"begins at step (\d+)", job.log())
    assert 0 < int(step) < 300
    assert "saved step 300" in job.log() + job.log(1)


def test_trials_of_an_app_and_a_job_that_never_saves(cell: LiveCell) -> None:
    """Three trials and the scoring of one run beside each other, and all succeed."""
    rates = ("01", "03", "1")
    trials = [
        cell.submit(
            "trial", "--name", f"trial-{rate}", "--env", f"RATE=0.{rate}", "--env", "STEPS=20",
            "--checkpoint", str(cell.directory / f"trial-{rate}.json"),
        )
        for rate in rates
    ]  # fmt: skip
    score = cell.submit("score", "--env", "STEPS=20")
    for job, rate in zip(trials, rates, strict=True):
        assert job.ends() == "succeeded"
        assert f"rate 0.{rate}: loss " in job.log()
    assert score.ends() == "succeeded"
    assert "18 of 20 right" in score.log()
