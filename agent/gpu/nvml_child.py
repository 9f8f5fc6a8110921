"""The process that touches NVML, so that the agent never does: asked on stdin, answers on stdout.

Run as `python -m agent.gpu.nvml_child SETTINGS`, SETTINGS being `ChildSettings` as JSON. It imports
little, because every node pays for its memory. It ends when stdin closes.
"""

from __future__ import annotations

import os
import queue
import signal
import sys
import threading
import time
import traceback
from pathlib import Path
from typing import BinaryIO

import msgspec

from agent.gpu.nvml import NvmlApi, real_api
from agent.gpu.sampler import GpuSampler
from agent.gpu.wire import HEADER, ChildSettings, Sample, frame_of, payload_bytes
from common.errors import ArylError, Unavailable

EXIT_GRACE_S = 1.0
"""How long NVML may take to close before the process exits without it."""


def open_api(settings: ChildSettings) -> NvmlApi:
    """NVML of this machine, or the fake one of a fleet file, initialized.

    Raises:
        Unavailable: no NVML here.
        ConfigError: the fleet file is invalid.
    """
    if not settings.fake_fleet:
        return real_api()
    # Imported only where it is used: a production child does not pay for the fake.
    from agent.gpu.fake.fleet import load_fleet
    from agent.gpu.fake.nvml import FakeNvml
    from agent.gpu.fake.processes import ProcessTable

    fleet = load_fleet(Path(settings.fake_fleet))
    fake = FakeNvml(
        fleet,
        node=settings.node,
        processes=ProcessTable(fleet.uuids(settings.node)),
        now_s=time.monotonic,
        pause=time.sleep,
        age_s=settings.fake_age_s,
    )
    fake.nvmlInit()
    return fake


def serve(settings: ChildSettings, asked: queue.SimpleQueue[bool], out: BinaryIO) -> int:
    """Answer each True in `asked` with a frame until a False; returns the exit status.

    A failure of the whole library is reported once and ends the process: the parent starts another
    one, which opens NVML again.
    """
    try:
        api = open_api(settings)
    except ArylError as error:
        if asked.get():
            _write(out, Sample(error=str(error)))
        return 1
    sampler = GpuSampler(api, gpu_deadline_s=settings.gpu_deadline_s)
    while asked.get():
        try:
            sample = sampler.sample()
        except Unavailable as error:
            _write(out, Sample(error=str(error)))
            return 1
        _write(out, sample)
    api.nvmlShutdown()
    return 0


def _write(out: BinaryIO, sample: Sample) -> None:
    out.write(frame_of(sample))
    out.flush()


def _private_stdout() -> BinaryIO:
    """Reserve stdout as the pipe to the parent.

    All other output to stdout goes to stderr from now on.
    """
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)
    return out


def _read_questions(stream: BinaryIO, asked: queue.SimpleQueue[bool]) -> None:
    """Read questions until the parent closes its end, or dies."""
    while len(header := stream.read(HEADER.size)) == HEADER.size:
        stream.read(payload_bytes(header))
        asked.put(True)


def main() -> None:
    """Read questions in this thread, so that a driver that hangs cannot keep the process."""
    settings = msgspec.json.decode(sys.argv[1], type=ChildSettings)
    # Ctrl-C at a terminal reaches the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    asked: queue.SimpleQueue[bool] = queue.SimpleQueue()
    out = _private_stdout()

    def run() -> None:
        status = 1
        try:
            status = serve(settings, asked, out)
        except BrokenPipeError:
            pass  # the parent has gone, so there is no reader
        except Exception:  # the exit skips the interpreter's own last message
            traceback.print_exc()
        finally:
            # The main thread waits in read(): only this ends it from here.
            os._exit(status)

    server = threading.Thread(target=run, name="nvml", daemon=True)
    server.start()
    _read_questions(sys.stdin.buffer, asked)
    asked.put(False)
    server.join(EXIT_GRACE_S)
    os._exit(0)


if __name__ == "__main__":
    main()
