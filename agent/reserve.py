"""Whether a worker could start here: its paths and its command, asked as the job's user. Must not
know GPUs or gangs.

What the job names wrong is its own fault. When the look itself fails, its node is to blame: any
other job would be refused as well, and the coordinator charges no job for it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import json
import os
import sys
from pathlib import Path
from typing import Protocol

from agent.worker_spec import Account
from common.clock import Clock
from common.faults import NODE_FAULT, STORAGE_SILENT

CHECK_TIMEOUT_S = 10.0
CHECKER = Path(__file__).with_name("shim_paths.py")


class Refuse(Protocol):
    """Asks whether a worker could start here; `refusal` is the one that looks at real files."""

    async def __call__(
        self, question: dict[str, str], *, account: Account | None, clock: Clock
    ) -> str:
        """Why not, or the empty string; the arguments of `refusal`."""
        ...


async def refusal(
    question: dict[str, str],
    *,
    account: Account | None,
    clock: Clock,
    timeout_s: float = CHECK_TIMEOUT_S,
    checker: Path = CHECKER,
) -> str:
    """Why not, or the empty string; begins with `NODE_FAULT` where the node is to blame. Asked in a
    process of its own: storage may hang for ever, and only a process can be somebody else.

    question: the arguments of `agent.shim_paths.refusal`.
    checker: the program that looks.
    """
    try:
        process = await asyncio.create_subprocess_exec(
            sys.executable, "-I", "-S", str(checker), json.dumps(question),
            stdin=asyncio.subprocess.DEVNULL,
            stdout=asyncio.subprocess.PIPE,
            cwd="/",
            env={"LANG": "C.UTF-8"},
            user=None if account is None else account.uid,
            group=None if account is None else account.gid,
            extra_groups=None
            if account is None
            else os.getgrouplist(account.name, account.gid),
        )  # fmt: skip
    except OSError as error:
        said = f"cannot look as the job's user: {error}"
        # What is asked is too long to be handed to a process, which the job's own would find too.
        return said if error.errno == errno.E2BIG else f"{NODE_FAULT}: {said}"
    try:
        async with clock.timeout(timeout_s):
            answer, _ = await process.communicate()
    except TimeoutError:
        what = f"{STORAGE_SILENT} in {timeout_s:g} s"
        return f"{NODE_FAULT}: workdir or checkpoint.path: {what}"
    finally:
        if process.returncode is None:  # an agent that ends leaves nobody behind who looks
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    said = answer.decode(errors="replace")
    if process.returncode != 0:
        said = said or f"exit code {process.returncode}"
        return f"{NODE_FAULT}: cannot look as the job's user: {said}"
    return said


class OneLook:
    """Whoever asks what is being looked for already shares that look: a gang on storage that hangs
    costs one process per node, and all of its workers are refused at once.

    A look that nobody waits for any more is ended.
    """

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self._looks: dict[tuple[object, ...], _Look] = {}

    async def __call__(
        self, question: dict[str, str], *, account: Account | None, clock: Clock
    ) -> str:
        """As `Refuse`."""
        asked = (account, *sorted(question.items()))
        look = self._looks.get(asked)
        if look is None:
            doing = self._refuse(question, account=account, clock=clock)
            look = self._looks[asked] = _Look(asyncio.ensure_future(doing))
        look.waiting_count += 1
        try:
            return await asyncio.shield(look.task)
        finally:
            look.waiting_count -= 1
            if (look.task.done() or not look.waiting_count) and self._looks.get(asked) is look:
                del self._looks[asked]
            if not look.waiting_count and not look.task.done():
                look.task.cancel()
                await asyncio.wait((look.task,))


class _Look:
    """One look under way, and how many wait for it."""

    def __init__(self, task: asyncio.Future[str]) -> None:
        self.task = task
        self.waiting_count = 0
