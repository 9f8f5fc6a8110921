"""Draws one frame of `aryl top` of a cell that runs, as an SVG. Must not know what is on it.

    .venv/bin/aryl up --nodes 1+3 &
    .venv/bin/python docs/picture.py --when-lent docs/picture.svg

What it draws is what the cell says of itself at that moment; nothing is made up or set right.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import os
import sys
from pathlib import Path

from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[1]))  # the code beside these pages, installed or not

from common.clock import SystemClock
from common.errors import ArylError, Unavailable
from common.model import NodeRole
from coordinator.cli.top import View, frame, look
from coordinator.client import Client, registry
from coordinator.client.target import Choice, over_nats, resolve

WIDTH = 118
PERIOD_S = 1.0


def drawing(view: View, *, height: int, title: str) -> str:
    """One frame as an SVG picture that needs no font of a network.

    Args:
        height: lines of the picture.
        title: on its upper edge.
    """
    with Path(os.devnull).open("w") as nowhere:
        paper = Console(
            record=True, width=WIDTH, file=nowhere, force_terminal=True, highlight=False
        )
        for line in frame(view, width=WIDTH, height=height):
            paper.print(line, no_wrap=True, crop=True)
        return _without_fonts(paper.export_svg(title=title))


def _without_fonts(svg: str) -> str:
    """rich links fonts of a server elsewhere; a picture in a repository stands alone."""
    head, _, rest = svg.partition("@font-face")
    while "@font-face" in rest:
        _, _, rest = rest.partition("@font-face")
    _, _, rest = rest.partition("}")
    return head + rest.lstrip()


def is_telling(view: View, *, must_be_lent: bool) -> bool:
    """Whether there is something to see: with `must_be_lent` work on a lent node, and a queue."""
    is_lent_busy = any(
        row.role == NodeRole.ON_LOAN and (row.gpu_busy_ratio or 0.0) > 0 for row in view.nodes.rows
    )
    return not must_be_lent or (is_lent_busy and view.status.pending_jobs > 0)


async def picture(*, must_be_lent: bool, height: int, timeout_s: float, clock: SystemClock) -> str:
    """Ask the cell of this machine until a frame tells something, and draw it.

    Raises:
        ConfigError: no cell runs here.
        Unavailable: its NATS server does not answer.
        TimeoutError: no such frame in time.
    """
    directory = registry.home()
    target = resolve(Choice(), os.environ, lambda: registry.find(directory))
    async with over_nats(target) as bus, clock.timeout(timeout_s):
        client = Client(bus, cell=target.cell, tenant=target.tenant, user=target.user)
        while True:
            with contextlib.suppress(Unavailable):  # a cell that is just starting
                view = await look(client, clock.wall_s())
                if is_telling(view, must_be_lent=must_be_lent):
                    return drawing(view, height=height, title="aryl top")
            await clock.sleep(PERIOD_S)


def main(arguments: list[str] | None = None) -> int:
    """Write the picture; 1 when there is no cell or nothing to see."""
    parser = argparse.ArgumentParser(description="Draw one frame of `aryl top` of a live cell.")
    parser.add_argument("file", type=Path, help="where the SVG goes")
    parser.add_argument("--when-lent", action="store_true", help="wait for jobs on lent nodes")
    parser.add_argument("--height", type=int, default=36, help="lines")
    parser.add_argument("--timeout-s", type=float, default=120.0, help="longest wait")
    options = parser.parse_args(arguments)
    work = picture(
        must_be_lent=options.when_lent,
        height=options.height,
        timeout_s=options.timeout_s,
        clock=SystemClock(),
    )
    try:
        svg = asyncio.run(work)
    except TimeoutError:
        sys.stderr.write(f"nothing to see within {options.timeout_s:g} s\n")
        return 1
    except ArylError as error:
        sys.stderr.write(f"{error}\n")
        return 1
    options.file.write_text(svg)
    return 0


if __name__ == "__main__":
    sys.exit(main())
