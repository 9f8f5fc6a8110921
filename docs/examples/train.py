"""An elastic training job that speaks the whole job contract, on the standard library alone.

It must not know Aryl's packages: environment, signals, files and one socket are all there is
(docs/job-contract.md). Worker 0 trains, faster with more workers; the others stand by, as the
processes of one real gang would compute for it, and leave when it has saved the last step.
"""

import contextlib
import json
import os
import select
import signal
import socket
import sys
import time
from pathlib import Path

TOTAL_STEPS = 2400
STEP_S = 0.5
STEPS_PER_SAVE = 120
CHECKPOINT = Path(os.environ["ARYL_CHECKPOINT_PATH"] or "checkpoint.json")


class Shim:
    """The supervisor's end of the contract; the job runs on without it."""

    def __init__(self) -> None:
        self.worker_count = int(os.environ["ARYL_WORKER_COUNT"])
        self.is_leaving = False
        self._rest = b""
        self._socket = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        self._socket.connect(os.environ["ARYL_CONTROL_SOCKET"])
        self.say(type="hello")
        signal.signal(signal.SIGTERM, self._on_signal)

    def say(self, **message: object) -> None:
        """One line of JSON; a shim that is gone does not end the job."""
        with contextlib.suppress(OSError):
            self._socket.sendall(json.dumps(message).encode() + b"\n")

    def hear(self, for_s: float) -> None:
        """Wait a while for orders, and take them."""
        if not select.select([self._socket], [], [], for_s)[0]:
            return
        data = self._socket.recv(65_536)
        if not data:
            time.sleep(for_s)
        *lines, self._rest = (self._rest + data).split(b"\n")
        for line in lines:
            order = json.loads(line)
            if order["type"] == "resize":
                self.worker_count = order["worker_count"]
            elif order["type"] in ("checkpoint_request", "stop"):
                self.is_leaving = True

    def _on_signal(self, number: int, frame: object) -> None:
        self.is_leaving = True


def save(step: int) -> None:
    """Whole or not at all: a reader must never find half a checkpoint."""
    draft = CHECKPOINT.with_suffix(".new")
    with draft.open("w") as file:
        json.dump({"step": step}, file)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(CHECKPOINT)


def first_step() -> int:
    """Where this attempt begins; the first one of a job does not go on from what has ended."""
    step = json.loads(CHECKPOINT.read_text())["step"] if CHECKPOINT.exists() else 0
    is_another_run = os.environ["ARYL_ATTEMPT"] == "1" and step >= TOTAL_STEPS
    return 0 if is_another_run else step


def train(shim: Shim) -> None:
    """Worker 0: from the last checkpoint to the end, or until asked to leave."""
    step = first_step()
    save(step)  # at once: were this attempt lost, the next would begin at another run's end
    sys.stdout.write(f"attempt {os.environ['ARYL_ATTEMPT']} begins at step {step}\n")
    while step < TOTAL_STEPS and not shim.is_leaving:
        shim.hear(STEP_S / shim.worker_count)
        step += 1
        shim.say(type="progress", step=step, total_steps=TOTAL_STEPS, loss=2.0 / (step + 1))
        if step % STEPS_PER_SAVE == 0:
            save(step)  # what a node that dies at once does not take along
    if shim.is_leaving:
        shim.say(type="checkpoint", stage="working", eta_s=1.0)
    save(step)
    shim.say(type="checkpoint", stage="saved", step=step, path=str(CHECKPOINT))
    sys.stdout.write(f"leaves at step {step} with {shim.worker_count} workers\n")


def saved() -> tuple[int, int]:
    """When the checkpoint was saved, and its step; zeros without one."""
    if not CHECKPOINT.exists():
        return 0, 0
    return CHECKPOINT.stat().st_mtime_ns, json.loads(CHECKPOINT.read_text())["step"]


def stand_by(shim: Shim) -> None:
    """Any other worker: there until told to leave, or until worker 0 has saved the last step.

    The job has succeeded once all its base workers have left by themselves; nobody tells them to.
    """
    of_another_run = saved() if os.environ["ARYL_ATTEMPT"] == "1" else None
    sys.stdout.write("stands by\n")
    while not shim.is_leaving:
        newest = saved()
        if newest != of_another_run and newest[1] >= TOTAL_STEPS:
            break
        shim.hear(1.0)


def main() -> int:
    """Exit code 0 also after leaving on request: the attempt did what it was asked."""
    shim = Shim()
    if os.environ["ARYL_WORKER_INDEX"] == "0":
        train(shim)
    else:
        stand_by(shim)
    if shim.is_leaving:
        shim.say(type="checkpoint", stage="released")
    return 0


if __name__ == "__main__":
    sys.exit(main())
