"""`make fuzz`: a coverage-guided fuzzer, atheris, on every decoder in turn.

    python -m tests.fuzz.run --minutes 10
    python -m tests.fuzz.run --minutes 2 --only 'job file'

Prints how many inputs each decoder took. An input that made a decoder raise another error than its
own is kept and named, and the exit code is 1.
"""

from __future__ import annotations

import argparse
import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from tests.fuzz.decoders import all_decoders
from tests.fuzz.test_decoders import NASTY

MAX_INPUT_BYTES = 4096
ONE_INPUT_S = 20
_UNITS = re.compile(rb"stat::number_of_executed_units:\s*(\d+)")


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(prog="make fuzz", description=__doc__)
    parser.add_argument("--minutes", type=float, default=10.0, help="for all decoders together")
    parser.add_argument("--only", default="", help="decoders whose name has this text")
    parser.add_argument(
        "--found",
        type=Path,
        default=Path("fuzz-found"),
        help="where inputs that broke a decoder go",
    )
    parser.add_argument("--one", help=argparse.SUPPRESS)
    args, rest = parser.parse_known_args()
    if args.one:
        return _fuzz(args.one, rest)
    names = [name for name in all_decoders() if args.only in name]
    if not names:
        parser.error(
            f"--only {args.only!r}: no such decoder; there are {', '.join(all_decoders())}"
        )
    each_s = max(1, round(args.minutes * 60 / len(names)))
    total, broken = 0, 0
    for name in names:
        count, is_broken = _run(name, each_s, args.found)
        total += count
        broken += is_broken
        print(f"{count:>10} inputs  {'BROKEN' if is_broken else 'ok    '}  {name}", flush=True)
    print(f"{total:>10} inputs in all, {broken} of {len(names)} decoders broken")
    return 1 if broken else 0


def _run(name: str, seconds: int, found: Path) -> tuple[int, bool]:
    """One decoder in a process of its own: (inputs that it took, whether one of them broke it)."""
    with tempfile.TemporaryDirectory(prefix="aryl-fuzz-", dir=_memory()) as scratch:
        corpus = Path(scratch, "corpus")
        corpus.mkdir()
        inputs = (*all_decoders()[name].seeds, *(nasty[:MAX_INPUT_BYTES] for nasty in NASTY))
        for index, data in enumerate(inputs):
            corpus.joinpath(str(index)).write_bytes(data[:MAX_INPUT_BYTES])
        kept = found / re.sub(r"[^a-z0-9]+", "-", name.lower())
        command = [
            *(sys.executable, "-m", "tests.fuzz.run", "--one", name),
            f"-max_total_time={seconds}",
            f"-max_len={MAX_INPUT_BYTES}",
            f"-timeout={ONE_INPUT_S}",
            "-print_final_stats=1",
            f"-artifact_prefix={scratch}/broken-",
            str(corpus),
        ]
        ended = subprocess.run(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "TMPDIR": scratch},
            check=False,
        )
        units = _UNITS.search(ended.stdout)
        if ended.returncode:
            kept.mkdir(parents=True, exist_ok=True)
            kept.joinpath("output.txt").write_bytes(ended.stdout[-20_000:])
            for artifact in Path(scratch).glob("broken-*"):
                kept.joinpath(artifact.name).write_bytes(artifact.read_bytes())
    return int(units[1]) if units else 0, ended.returncode != 0


def _memory() -> Path | None:
    """A file system in memory: decoders of files read a new file for each input."""
    place = Path("/dev/shm")
    return place if place.is_dir() else None


def _fuzz(name: str, arguments: list[str]) -> int:
    import atheris

    # Coverage of the parsers that are Python; msgspec's are C, and take what the seeds lead to.
    with atheris.instrument_imports(
        include=[
            "tomllib",
            "json",
            "yaml",
            "prometheus_client",
            "csv",
            "agent",
            "common",
            "coordinator",
        ],
        enable_loader_override=False,
    ):
        decoder = all_decoders()[name]

    def one(data: bytes) -> None:
        try:
            decoder.decode(data)
        except decoder.own:
            return

    atheris.Setup([sys.argv[0], *arguments], one)
    atheris.Fuzz()
    return 0


if __name__ == "__main__":
    sys.exit(main())
