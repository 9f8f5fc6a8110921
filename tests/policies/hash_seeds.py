"""What a program says whatever the hash seed; must not know what it decides."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

SEEDS = ("0", "1")


def said(program: str) -> set[bytes]:
    """All that it writes, under each hash seed; it may import the tests."""
    return {
        subprocess.run(
            [sys.executable, "-c", program],
            env={**os.environ, "PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[2],
            check=True,
            capture_output=True,
        ).stdout
        for seed in SEEDS
    }
