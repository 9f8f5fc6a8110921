"""A gang's rendezvous store on a real cell: its workers meet there, and its end is theirs."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest
from msgspec.structs import replace

from common.api import GetLogs, Logs
from common.model import STORE_INDEX, JobState, RendezvousSpec, WorkerRange
from tests.harness.live.cell import is_alive, running_cell
from tests.harness.node.rendezvous_store import KEY_VALUE_STORE

pytestmark = [pytest.mark.nats, pytest.mark.slow]

MEET = """
import os, socket, sys, time
host, _, port = os.environ["ARYL_RENDEZVOUS_ENDPOINT"].rpartition(":")
link = socket.create_connection((host, int(port)))
answers = link.makefile()
def ask(line):
    link.sendall((line + "\\n").encode())
    return answers.readline().strip()
name = "rank" + os.environ["ARYL_WORKER_INDEX"]
ask(name + "=here")
while not (ask("rank0") and ask("rank1")):
    time.sleep(0.05)
with open(os.path.join(os.environ["OUT"], "met"), "a") as file:
    file.write(os.environ["ARYL_ATTEMPT"] + " " + name + "\\n")
while not os.path.exists(os.path.join(os.environ["OUT"], "go")):
    time.sleep(0.05)
"""
"""A worker that meets its partner at the store, says so, and waits to be let go."""
STORE = ("sh", "-c", 'echo $$ >> $OUT/stores; exec "$@"', "sh", *KEY_VALUE_STORE)


async def test_a_gang_meets_at_its_store_and_starts_anew_when_that_is_killed(
    tmp_path: Path,
) -> None:
    """Free of charge, with a store of its own; and no store is left when the job has ended."""
    async with running_cell(tmp_path, training_nodes=2, inference_nodes=0) as harness:
        spec = harness.shell("gang", "", gpus=4)
        job_id = await harness.submit(
            replace(
                spec,
                command=(KEY_VALUE_STORE[0], "-I", "-S", "-c", MEET),
                workers=WorkerRange(min=2, max=2),
                rendezvous=RendezvousSpec(command=STORE),
            )
        )

        async def have_met(attempt: int) -> bool:
            met = {f"{attempt} rank0", f"{attempt} rank1"}
            return met <= set(harness.said("met"))

        await harness.until("both workers have met", lambda: have_met(1))
        [first] = [int(line) for line in harness.said("stores")]
        os.kill(first, signal.SIGKILL)
        await harness.until("they have met again", lambda: have_met(2))
        _, second = [int(line) for line in harness.said("stores")]
        assert is_alive(second)
        (harness.directory / "go").touch()
        row = await harness.until_state(job_id, JobState.SUCCEEDED)
        assert (row.attempt, row.exit_code) == (2, 0)

        async def has_left() -> bool:
            return not is_alive(second)

        await harness.until("its store has left", has_left)

        async def is_kept() -> bool:
            request = GetLogs(job_id=job_id, worker_index=STORE_INDEX)
            return (await harness.client.ask(request, Logs)).text == f"pid {second}\n"

        await harness.until("its log is kept", is_kept)
        assert (await harness.client.ask(GetLogs(job_id=job_id), Logs)).worker_index == 0
