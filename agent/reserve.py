"""Whether a worker could start here: its paths and its command, asked as the job's user. Must not
know GPUs or gangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import sys
from pathlib import Path
from typing import Protocol

from agent.worker_spec import Account
from common.clock import Clock

CHECK_TIMEOUT_S = 10.0
CHECKER = Path(__file__).with_name("shim_files.py")


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
    """Why not, or the empty string. Asked in a process of its own: storage may hang for ever, and
    only a process can be somebody else.

    question: the arguments of `agent.shim_files.refusal`.
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
        return f"cannot look as the job's user: {error}"
    try:
        async with clock.timeout(timeout_s):
            answer, _ = await process.communicate()
    except TimeoutError:
        return f"workdir or checkpoint.path: the storage did not answer in {timeout_s:g} s"
    finally:
        if process.returncode is None:  # an agent that ends leaves nobody behind who looks
            with contextlib.suppress(ProcessLookupError):
                process.kill()
    if process.returncode != 0:
        return f"cannot look as the job's user: exit code {process.returncode}"
    return answer.decode(errors="replace")
