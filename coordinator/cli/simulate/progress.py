"""A progress bar over all runs on this machine.

Each run writes its progress into a file of its own; a thread adds them up. A run on another machine
shows only when it has ended.
"""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from tempfile import TemporaryDirectory
from threading import Event, Thread

from msgspec import structs
from rich.console import Console
from rich.progress import (
    BarColumn,
    Progress,
    TaskProgressColumn,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from common.clock import Clock, SystemClock
from coordinator.cli.session import PlainConsole
from coordinator.sim.run.compare import Task

PERIOD_S = 0.25


@contextmanager
def watching(
    tasks: Sequence[Task], *, jobs: int, out: Console | None = None, clock: Clock | None = None
) -> Generator[list[Task]]:
    """The tasks with progress reporting, and a bar on standard error while the block runs.

    Where standard error is no terminal there is no bar and no output.

    Args:
        jobs: of one run; all are taken as equally long.
    """
    out = out or PlainConsole(stderr=True)
    clock = clock or SystemClock()
    if not out.is_terminal:
        yield list(tasks)
        return
    with TemporaryDirectory(prefix="aryl-simulate-") as directory:
        files = [Path(directory, str(index)) for index in range(len(tasks))]
        told = [
            structs.replace(task, progress=str(file))
            for task, file in zip(tasks, files, strict=True)
        ]
        bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            TaskProgressColumn(),
            TextColumn("{task.fields[events]:,} events, {task.fields[rate]:,.0f}/s"),
            TimeElapsedColumn(),
            TextColumn("ETA"),
            TimeRemainingColumn(),
            console=out,
            transient=True,
        )
        runs = f"{len(tasks)} runs" if len(tasks) > 1 else tasks[0].options.policy
        shown = bar.add_task(runs, total=jobs * len(tasks), events=0, rate=0.0)
        is_over = Event()
        began_s = clock.now_s()

        def look() -> None:
            while not is_over.wait(PERIOD_S):
                ended, events = tally(files)
                rate = events / max(1e-9, clock.now_s() - began_s)
                bar.update(shown, completed=ended, events=events, rate=rate)

        thread = Thread(target=look, name="progress")
        with bar:
            thread.start()
            try:
                yield told
            finally:
                is_over.set()
                thread.join()


def tally(files: Sequence[Path]) -> tuple[int, int]:
    """(jobs that ended, events) over all runs; a run without progress yet counts as not begun.

    A run's progress file is replaced in one step, so both only grow.
    """
    ended = events = 0
    for file in files:
        # There is no file before its run says anything; a disk may be full.
        with suppress(OSError, ValueError):
            jobs, of_it = file.read_text().split()
            ended, events = ended + int(jobs), events + int(of_it)
    return ended, events
