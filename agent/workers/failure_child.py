"""The process that matches one failed worker's log against a site's rules, and ends.

A site's pattern may take for ever on some line, and Python's `re` blocks all other threads
meanwhile: only a separate process, which the agent can kill, protects the agent. Run as `python -m
agent.workers.failure_child`: a `Question` comes on stdin, a `Failure` goes to stdout, both
MessagePack.
"""

from __future__ import annotations

import os
import signal
import sys

import msgspec
from msgspec import Struct

from common.failure_rules import FailureRules, RuleFile


class Question(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The input of a match: the arguments of `FailureRules` and of its `classify`."""

    files: tuple[RuleFile, ...]
    log: bytes
    exit_code: int | None
    error: str


def answer(question: bytes) -> bytes:
    """The failure that a question is about.

    Raises:
        msgspec.DecodeError: it is no question.
        ConfigError: its rules are invalid.
    """
    asked = msgspec.msgpack.decode(question, type=Question)
    rules = FailureRules(*asked.files)
    found = rules.classify(asked.log, exit_code=asked.exit_code, error=asked.error)
    return msgspec.msgpack.encode(found)


def main() -> None:
    """Read all of stdin, answer once."""
    # Ctrl-C at a terminal reaches the whole group; the parent decides when this process ends.
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with os.fdopen(os.dup(1), "wb") as out:
        os.dup2(2, 1)  # any other output to stdout is no answer
        out.write(answer(sys.stdin.buffer.read()))


if __name__ == "__main__":
    main()
