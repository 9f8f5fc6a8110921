"""The demo's training job, which also writes down by itself that it lives, and how it ends.

Run as the worker of live tests: `python -S beating_worker.py --work-s ...`. Each process appends
lines of JSON to a file of its own in $BEATS, by plain writes; instants are of the boot clock.
Must not ask Aryl anything.
"""

from __future__ import annotations

import json
import os
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[2]))

from coordinator.demo.worker import Follower, Leader, Worker, options_of

BEAT_S = 0.25


class Beats:
    """One process's file."""

    def __init__(self, environment: Mapping[str, str]) -> None:
        job = environment["ARYL_JOB_ID"]
        attempt = int(environment["ARYL_ATTEMPT"])
        index = int(environment["ARYL_WORKER_INDEX"])
        path = f"{environment['BEATS']}/{job}.{attempt}.{index}.{os.getpid()}"
        self._fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
        self._lock = threading.Lock()
        directory = environment["ARYL_WORKER_DIRECTORY"]
        self.say(
            "begin",
            job=job,
            attempt=attempt,
            index=index,
            pid=os.getpid(),
            node=Path(directory).parents[2].name,
            is_flexible=environment["ARYL_IS_FLEXIBLE"] == "1",
            workers_min=int(environment["ARYL_WORKERS_MIN"]),
            gpus=environment["CUDA_VISIBLE_DEVICES"].split(","),
        )
        threading.Thread(target=self._beat_for_ever, daemon=True).start()

    def say(self, what: str, **values: object) -> None:
        """Append one line."""
        with self._lock:
            now_s = round(time.clock_gettime(time.CLOCK_BOOTTIME), 3)
            line = json.dumps({"at_s": now_s, "what": what, **values})
            os.write(self._fd, line.encode() + b"\n")

    def _beat_for_ever(self) -> None:
        while True:
            time.sleep(BEAT_S)
            self.say("beat")


class Noting(Worker):
    """Writes down what it is asked to do."""

    beats: Beats

    def _note(self, message: dict[str, object]) -> None:
        if message.get("type") in ("checkpoint_request", "stop"):
            self.beats.say("asked", reason=str(message.get("reason", "")))
        super()._note(message)


class BeatingLeader(Noting, Leader):
    """Worker 0."""


class BeatingFollower(Noting, Follower):
    """Any other worker."""


def main() -> int:
    """One worker of one attempt; the exit status."""
    Noting.beats = beats = Beats(os.environ)
    is_leader = int(os.environ["ARYL_WORKER_INDEX"]) == 0
    worker = (BeatingLeader if is_leader else BeatingFollower)(options_of(None), os.environ)
    status = worker.run()
    is_asked = worker.request is not None or worker.is_told_to_stop
    beats.say("end", status=status, is_finished=status == 0 and not is_asked)
    return status


if __name__ == "__main__":
    sys.exit(main())
