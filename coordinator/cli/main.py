"""The `aryl` command: parse, call, print. Must not decide anything."""

from __future__ import annotations

import argparse
from importlib.metadata import version


def main() -> None:
    """Entry point."""
    parser = argparse.ArgumentParser(prog="aryl")
    parser.add_argument("--version", action="version", version=f"aryl {version('aryl')}")
    parser.parse_args()
    parser.print_help()
