"""The other examples, each as its job file says."""

from __future__ import annotations

import re

from tests.training.live import LiveCell


def test_lightning_resumes_from_its_last_checkpoint(cell: LiveCell) -> None:
    """It knows nothing of Aryl; a drained node costs it the steps since its last save, no more."""
    cell.aryl("recall", "--all")
    job = cell.submit("lightning", "--workers", "1:2", "--env", "STEPS=600")

    def steps(ranks: int) -> list[int]:
        """Those that it told of with so many ranks; any worker may have rank 0."""
        found = re.findall(rf"step (\d+) of {ranks}:", job.log(0) + job.log(1))
        return [int(step) for step in found]

    cell.wait("it trains", lambda: 30 in steps(ranks=2))
    [node] = job.nodes(flexible=True)
    cell.aryl("node", "drain", node, "--yes")
    assert job.ends() == "succeeded", job.log()
    cell.aryl("node", "uncordon", node)
    cell.aryl("recall", "--all", "--off")
    assert max(steps(ranks=2)) - 30 < min(steps(ranks=1))  # it saves every 20, and tells every 10


def test_a_gang_of_plain_workers_trains_and_resumes(cell: LiveCell) -> None:
    """Two ranks, no launcher; a drained node preempts both, and they go on from their save."""
    job = cell.submit("gang", "--env", "STEPS=300")
    cell.wait("it trains", lambda: "begins at step 0" in job.log() and job.state == "running")
    cell.aryl("node", "drain", "train-1", "--yes")
    cell.wait("it starts anew", lambda: job.described()["job"]["attempt"] == 2)
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
