"""Fills the generated blocks of the documentation from the code. Must not hold facts of its own.

    .venv/bin/python docs/generate.py            write what changed
    .venv/bin/python docs/generate.py --check    write nothing; say what is stale and exit 1

A block lies in a page between `<!-- generated: NAME -->` and `<!-- end -->`; `blocks.BLOCKS` says
what fills it. A marker without a block, a block without a marker and a block that is given twice
are errors.
"""

from __future__ import annotations

import argparse
import re
import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))  # the code beside these pages, installed or not

from blocks import BLOCKS, Blocks

DOCS_DIR = Path(__file__).parent
_BLOCK = re.compile(
    r"(?P<open><!-- generated: (?P<name>[^>]+?) -->\n).*?(?P<close><!-- end -->)", re.DOTALL
)


def fill(page: str, blocks: Blocks) -> tuple[str, list[str]]:
    """A page with its blocks filled, and the names of them.

    Raises:
        ValueError: a marker names no block.
    """
    names: list[str] = []

    def replace(found: re.Match[str]) -> str:
        name = found["name"]
        if name not in blocks:
            raise ValueError(f"no block {name!r}; there are: {', '.join(sorted(blocks))}")
        names.append(name)
        return f"{found['open']}\n{blocks[name]()}\n\n{found['close']}"

    return _BLOCK.sub(replace, page), names


def main(arguments: list[str] | None = None) -> int:
    """Write the pages, or with --check say which are stale; 1 when something is wrong."""
    parser = argparse.ArgumentParser(description="Fill the generated blocks of the documentation.")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 when stale")
    is_check: bool = parser.parse_args(arguments).check
    stale: dict[Path, str] = {}
    placed: list[str] = []
    for path in sorted(DOCS_DIR.rglob("*.md")):
        page = path.read_text()
        filled, names = fill(page, BLOCKS)
        placed += names
        if filled != page:
            stale[path] = filled
    for path, filled in stale.items():
        if not is_check:
            path.write_text(filled)
        verb = "stale" if is_check else "wrote"
        sys.stdout.write(f"{verb}: {path.relative_to(DOCS_DIR.parent)}\n")
    if sorted(placed) != sorted(BLOCKS):
        sys.stdout.write(f"each block belongs in one page, once; found: {sorted(placed)}\n")
        return 1
    return 1 if is_check and stale else 0


if __name__ == "__main__":
    sys.exit(main())
