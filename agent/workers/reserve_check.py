"""Checks that a worker could start here: its paths and its command, looked up as the job's user.

A wrong path or command is the job's own fault. When the lookup itself fails, the node is at fault:
it would refuse any other job as well, and the coordinator charges no job for it.
"""

from __future__ import annotations

import asyncio
import errno
import json
import os
import signal
import sys
from pathlib import Path
from typing import Protocol

from agent.core.state import Refusal
from agent.workers.spec import Account
from common.children import send_signal
from common.clock import Clock
from common.faults import STORAGE_SILENT, Fault

CHECK_TIMEOUT_S = 10.0
CHECKER = Path(__file__).parents[1] / "shim/paths.py"
COMMAND = "command"
"""The answer to a question that is too long for a process: a path that long does not exist."""


class Refuse(Protocol):
    """Checks whether a worker could start here; `refusal` is the one that looks at real files."""

    async def __call__(
        self, question: dict[str, str], *, account: Account | None, clock: Clock
    ) -> Refusal | None:
        """Why it could not, or None; the arguments of `refusal`."""
        ...


async def refusal(
    question: dict[str, str],
    *,
    account: Account | None,
    clock: Clock,
    timeout_s: float = CHECK_TIMEOUT_S,
    checker: Path = CHECKER,
) -> Refusal | None:
    """Why a worker cannot start, and whose fault that is; None when it can.

    It asks in a separate process: storage may hang for ever, and only a process can change its
    account.

    question: the arguments of `agent.shim.paths.refusal`.
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
        if error.errno == errno.E2BIG:
            # The question is too long for a process: the job's own command would be too.
            return Refusal(said, Fault.JOB, COMMAND)
        return Refusal(said)
    try:
        async with clock.timeout(timeout_s):
            answer, _ = await process.communicate()
    except TimeoutError:
        what = f"{STORAGE_SILENT} in {timeout_s:g} s"
        return Refusal(f"workdir or checkpoint.path: {what}", Fault.STORAGE)
    finally:
        if process.returncode is None:  # an agent that ends leaves no checker behind
            send_signal(process, signal.SIGKILL)
    said = answer.decode(errors="replace")
    if process.returncode != 0:
        said = said or f"exit code {process.returncode}"
        return Refusal(f"cannot look as the job's user: {said}")
    refused_for, _, why = said.partition("\n")
    return Refusal(why, Fault.JOB, refused_for) if said else None


class OneLook:
    """Shares one look among all callers with the same question.

    A gang on storage that hangs therefore costs one process per node, and all of its workers are
    refused at once. A look without callers left is ended.
    """

    def __init__(self, refuse: Refuse) -> None:
        self._refuse = refuse
        self._looks: dict[tuple[object, ...], _Look] = {}

    async def __call__(
        self, question: dict[str, str], *, account: Account | None, clock: Clock
    ) -> Refusal | None:
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
    """One look under way, and its number of callers."""

    def __init__(self, task: asyncio.Future[Refusal | None]) -> None:
        self.task = task
        self.waiting_count = 0
