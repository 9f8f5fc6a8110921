"""Elastic DDP under torchrun, through every change of its workers that a cell makes."""

from __future__ import annotations

import json
import os
import statistics
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.training.live import Change, Job, LiveCell, Step, curve

STEPS_PER_SAVE = 50
"""Of the example."""
RETRY = "[retry]\nmax_restarts = 1"
SCRIPT = "ddp.py"


class Training:
    """The example's job, and what each change has cost it so far."""

    def __init__(self, cell: LiveCell) -> None:
        cell.aryl("recall", "--all")
        self.cell = cell
        self.job: Job = cell.submit("ddp", "--workers", "1:3", "--env", "STEPS=100000", more=RETRY)
        self.changes: list[Change] = []
        self.file = cell.directory / "ddp.csv"

    def steps(self) -> list[Step]:
        """Every step so far."""
        return curve(self.file)

    def after(self, what: str, *, ranks: int | None = None) -> Change:
        """Wait until new processes train on; what the change cost.

        ranks: how many; None: as many as there are.
        """
        before = self.steps()

        def newest() -> list[Step]:
            new = self.steps()[len(before) :]
            return [step for step in new if step.pid == new[-1].pid]

        def trains_on() -> bool:
            new = newest()
            is_new = len(new) > 10 and not (before and new[0].pid == before[-1].pid)
            return is_new and ranks in (None, new[0].ranks)

        self.cell.wait(f"{what}: {ranks} ranks that train", trains_on)
        first = newest()[0]
        earlier = [step for step in self.steps() if step.at_s < first.at_s]
        processes = self.job.ranks(SCRIPT)
        if earlier:
            began_s = earlier[-1].at_s
        else:  # torchrun's own start is then the job's as well
            began_s = self.job.described()["job"]["started_at_s"]
            processes = [rank.parent() or rank for rank in processes]
        change = Change(
            what=what,
            ranks=first.ranks,
            pause_s=first.at_s - began_s,
            start_up_s=first.at_s - max(process.create_time() for process in processes),
            repeated=max(0, earlier[-1].step + 1 - first.step) if earlier else 0,
        )
        self.changes.append(change)
        return change


@pytest.fixture(scope="module")
def training(cell: LiveCell) -> Iterator[Training]:
    """One job through all of this module; what it measured is kept where asked."""
    training = Training(cell)
    yield training
    if into := os.environ.get("ARYL_TRAINING_RESULTS"):
        rows = [change._asdict() for change in training.changes]
        Path(into).write_text(json.dumps(rows, indent=1) + "\n")


def assert_nothing_lost(change: Change) -> None:
    """All ranks saved before they left: no step is trained twice."""
    assert change.repeated == 0, change


def test_it_starts_below_its_largest_size(training: Training) -> None:
    """As nothing may be lent yet, two of three workers start, and do not wait for a third."""
    assert_nothing_lost(training.after("start below max", ranks=2))


def test_it_grows_onto_a_lent_node(training: Training) -> None:
    """The service lends a node; the ranks that ran save, and all meet again."""
    training.cell.aryl("recall", "--all", "--off")
    assert_nothing_lost(training.after("grow onto a lent node", ranks=3))


def test_it_shrinks_when_the_loan_is_revoked(training: Training) -> None:
    """The lent node's worker leaves with its grace; the others go on without it."""
    training.cell.aryl("recall", "--all")
    assert_nothing_lost(training.after("loan revoked", ranks=2))


def test_it_shrinks_when_a_node_is_drained(training: Training) -> None:
    """The flexible worker of the other training node leaves; one rank goes on."""
    [node] = training.job.nodes(flexible=True)
    training.cell.aryl("node", "drain", node, "--yes")
    assert_nothing_lost(training.after("node drained", ranks=1))


def test_it_grows_again(training: Training) -> None:
    """A new worker on a node from which one left before."""
    [node] = {"train-1", "train-2"} - set(training.job.nodes(flexible=False))
    training.cell.aryl("node", "uncordon", node)
    assert_nothing_lost(training.after("regrow", ranks=2))


def test_it_is_preempted_and_resumes_elsewhere(training: Training) -> None:
    """The node of its base worker is drained: all leave, and a new attempt starts on the other."""
    [node] = training.job.nodes(flexible=False)
    training.cell.aryl("node", "drain", node, "--yes")
    assert_nothing_lost(training.after("preempt and resume", ranks=1))
    assert training.job.described()["job"]["attempt"] == 2
    training.cell.aryl("node", "uncordon", node)
    assert_nothing_lost(training.after("grow", ranks=2))


def test_a_crash_is_a_crash_and_costs_what_was_not_saved(training: Training) -> None:
    """A rank that is killed ends the attempt as the job's own fault, and not one more within it;
    the next one goes on from the last save."""
    attempt = training.job.described()["job"]["attempt"]
    training.job.ranks(SCRIPT)[0].kill()
    change = training.after("crash")
    assert 0 <= change.repeated <= STEPS_PER_SAVE
    assert training.job.described()["job"]["attempt"] == attempt + 1
    told = [entry["reason"] for entry in training.job.described()["story"]]
    assert any("own fault: exit code 137" in reason for reason in told), told


def test_the_loss_goes_on_falling(training: Training) -> None:
    """Over all changes: after each one the loss is where it was before, and in the end lowest."""
    every = training.steps()
    for i in range(10, len(every) - 10):
        if every[i].ranks != every[i - 1].ranks:
            before = statistics.mean(step.loss for step in every[i - 10 : i])
            after = statistics.mean(step.loss for step in every[i : i + 10])
            assert after < 1.5 * before
    losses = [step.loss for step in every]
    assert statistics.mean(losses[-20:]) < statistics.mean(losses[:20]) / 4


def test_another_crash_ends_the_job(training: Training) -> None:
    """Its budget is spent: it fails with the exit code of the rank, as of a signal."""
    training.job.ranks(SCRIPT)[-1].kill()
    assert training.job.ends() == "failed"
    assert training.job.described()["job"]["exit_code"] == 137
