"""Fragments of the pages, as HTML, from the rows of the API. Pure but for templates read at start.

All text of jobs, nodes and files is escaped, and its control codes are made visible. A length of
time that grows is an instant here, from which the browser counts: a fragment whose rows did not
change is the same text as before, and is not sent again.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, TypeVar, cast

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup
from msgspec import UNSET, structs

from common.api import ClosedRow, JobRow, LoanRow, NodeRow, ServiceRow, StoryRow, UnknownLoadRow
from common.model import JobState, NodeRole, Pool
from common.terminal import visible, visible_log
from coordinator import plain_text
from coordinator.policies.contract.text import counted
from coordinator.web import timeline
from coordinator.web.board import Frame
from coordinator.web.feed import Link

if TYPE_CHECKING:
    from coordinator.web.looks import CellView, ThingView

ROWS_SHOWN = 100
"""Rows of the queue and of the running jobs; more are counted."""
LOANS_SHOWN = 40
UNWELL_SHOWN = 50
COMPACT_NODES = 60
"""Tiles of a larger fleet are small, and show their words only where they are pointed at."""
GOING_HOME = frozenset({"coming home"})

ROLE_SIGNS = {
    NodeRole.TRAINING: "■",
    NodeRole.SERVING: "●",
    NodeRole.DRAINING: "▽",
    NodeRole.ON_LOAN: "◆",
    NodeRole.VACATING: "◁",
    NodeRole.WARMING: "◐",
    NodeRole.QUARANTINED: "✕",
    NodeRole.LOST: "?",
}
"""A shape beside the color of each role."""

STAGE_SHADES = {
    "ordered": 0, "wait": 0, "notify": 0,
    "checkpoint": 1, "vacating": 1,
    "exit": 2, "draining": 2,
    "device_free": 3,
    "server_ready": 4, "warming": 4,
}  # fmt: skip
"""Shades of the stages of a way home, as its events name them and as its node measures them."""

R = TypeVar("R")
Items = list[tuple[str, str]]


class Pages:
    """Makes fragments; remembers those of rows that stay the same.

    Args:
        cell: name of the cell, in every title.
    """

    def __init__(self, *, cell: str) -> None:
        self._env = Environment(
            loader=PackageLoader("coordinator.web"),
            autoescape=True,
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            finalize=_visible,
        )
        self._env.filters |= {
            "duration": plain_text.duration,
            "instant": plain_text.instant,
            "percent": plain_text.percent,
            "number": plain_text.number,
            "log": _log,
        }
        names = cast("dict[str, Any]", self._env.globals)
        names |= {
            "signs": ROLE_SIGNS,
            "shades": STAGE_SHADES,
            "counted": counted,
            "role": plain_text.role,
        }
        self._parts: Any = self._env.get_template("parts.html.j2").module
        self._cell = cell
        self._kept: dict[str, dict[str, tuple[object, str]]] = {}

    def shell(self, *, kind: str, name: str, has_token: bool) -> str:
        """The page around the fragments, without data. kind: empty for the cell."""
        page = self._env.get_template("shell.html.j2")
        return page.render(cell=self._cell, kind=kind, name=name, has_token=has_token)

    def login(self, *, is_wrong: bool) -> str:
        """The form that asks for the token."""
        return self._env.get_template("login.html.j2").render(cell=self._cell, is_wrong=is_wrong)

    def link(self, link: Link) -> str:
        """Whether the coordinator answers, and how old the page is."""
        return self._text("link", link)

    def cell(self, view: CellView) -> Frame:
        """The page of the cell."""
        status = view.status
        waiting = [row for row in view.jobs if row.state == JobState.PENDING]
        running = [row for row in view.jobs if row.state != JobState.PENDING]
        going = [row for row in view.loans if row.state in GOING_HOME]
        going.sort(key=_deadline_at_s)
        out = [row for row in view.loans if row.state not in GOING_HOME]
        unwell = [row for row in view.nodes if _is_unwell(row)]
        roles = timeline.roles_since(view.events, {row.node: row for row in going})
        is_compact = len(view.nodes) > COMPACT_NODES
        groups = _groups(view.nodes)
        if is_compact:  # names of their own: a group that changes its form is new to a browser
            groups = [(f"{key}-compact", title, rows) for key, title, rows in groups]
        services = {row.service: row for row in view.services}
        texts = {
            "status": self._text("status", status),
            "alerts": self._text("alerts", _alerts(view)),
            "figures": self._text("figures", status, waiting, unwell),
            "queue-more": self._text("more", len(waiting), ROWS_SHOWN, "aryl job list"),
            "running-more": self._text("more", len(running), ROWS_SHOWN, "aryl job list"),
            "loans-more": self._text("more", len(going) + len(out), LOANS_SHOWN, "aryl loan list"),
            "unwell-more": self._text("more", len(unwell), UNWELL_SHOWN, "aryl node list"),
            "count-queue": str(len(waiting)),
            "count-running": str(len(running)),
            "count-going": str(len(going)),
            "count-out": str(len(out)),
            "count-nodes": str(len(view.nodes)),
            "count-unwell": str(len(unwell)),
        }
        lists: dict[str, Sequence[tuple[str, str]]] = {
            "going": [
                (row.lease_id, self._going(row, roles.get(row.node, []), now_s=view.now_s))
                for row in going[:LOANS_SHOWN]
            ],
            "queue": self._rows("queued", waiting[:ROWS_SHOWN], _job_key),
            "out": self._rows("lent", out[: max(0, LOANS_SHOWN - len(going))], _loan_key),
            "home": self._rows("came_home", view.returned, _loan_key, of=timeline.home),
            "unwell": self._rows("unwell", map(_steady, unwell[:UNWELL_SHOWN]), _node_key),
            "running": self._rows("running", running[:ROWS_SHOWN], _job_key),
            "fleet": [
                (key, self._text("group", key, title, is_compact)) for key, title, _ in groups
            ],
        }
        for key, _, rows in groups:
            texts[f"about-{key}"] = self._text("about_group", rows, services.get(_service_of(rows)))
            tile = "small_tile" if is_compact else "tile"
            lists[f"nodes-{key}"] = self._rows(tile, map(_steady, rows), _node_key, place=key)
        nodes = frozenset(row.node for row in view.nodes)
        named = [(line, _kind_of(line, nodes, services)) for line in reversed(view.events)]
        lists["events"] = self._rows("event", named, lambda pair: str(pair[0].number))
        return Frame(texts=texts, lists=lists)

    def thing(self, view: ThingView) -> Frame:
        """The page of one job, node, service or loan."""
        found = view.found
        texts = {
            "title": self._text("thing_title", found),
            "facts": self._text("thing_facts", found),
            "why": self._text("thing_why", found),
            "line": "",
            "log": "",
        }
        if found.job is not None:
            line = timeline.of_job(found.job, found.story, found.saves, now_s=view.now_s)
            texts["line"] = self._text("job_line", found.job, line)
            texts["log"] = self._text("log", view.log, view.log_absent)
        if found.loan is not None and found.loan.returned_at_s is not None:
            texts["line"] = self._text("came_home", found.loan, timeline.home(found.loan))
        story = [(line, "") for line in reversed(found.story)]
        return Frame(
            texts=texts,
            lists={
                "loans": self._rows("loan_row", found.loans[::-1], _loan_key),
                "gpus": []
                if found.telemetry is None
                else self._rows("gpu", found.telemetry.gpus, lambda gpu: gpu.uuid),
                "workers": self._rows("worker", found.workers, lambda row: str(row.worker_index)),
                "nodes-of": self._rows("tile", map(_steady, found.nodes), _node_key),
                "events": self._rows("event", story, lambda pair: str(pair[0].number)),
            },
        )

    def _going(self, row: LoanRow, roles: Sequence[tuple[float, NodeRole]], *, now_s: float) -> str:
        way = timeline.under_way(row, roles, now_s=now_s)
        return self._text("going", row, way)

    def _text(self, part: str, *values: object) -> str:
        return str(getattr(self._parts, part)(*values)).strip()

    def _rows(
        self,
        part: str,
        rows: Iterable[R],
        key: Callable[[R], str],
        *,
        of: Callable[[R], object] | None = None,
        place: str = "",
    ) -> Items:
        """Items of a list; the HTML of a row that is as before is not made again.

        Args:
            of: a second value for the part, made of the row.
            place: the number of the list, where a part has several.
        """
        before, now = self._kept.get(part + place, {}), dict[str, tuple[object, str]]()
        for row in rows:
            name = key(row)
            known = before.get(name)
            if known is None or known[0] != row:
                values = (row,) if of is None else (row, of(row))
                known = (row, self._text(part, *values))
            now[name] = known
        self._kept[part + place] = now
        return [(name, html) for name, (_, html) in now.items()]


def _visible(value: Any) -> Any:
    """Control codes of texts become visible; HTML of ours stays."""
    return visible(value) if isinstance(value, str) and not isinstance(value, Markup) else value


def _log(text: str) -> Markup:
    """A log with its control codes made visible, without its colors."""
    return Markup.escape(visible_log(text))


def _steady(row: NodeRow) -> NodeRow:
    """A node without what differs in each report: how long ago that was, and noise of its use."""
    busy = row.gpu_busy_ratio
    return structs.replace(
        row,
        heard_ago_s=None if row.heard_ago_s is None else 0.0,
        gpu_busy_ratio=None if busy is None else round(busy * 20) / 20,
    )


def _is_unwell(row: NodeRow) -> bool:
    """Whether a person should look at a node."""
    return (
        row.role in (NodeRole.LOST, NodeRole.QUARANTINED)
        or not row.is_heard
        or row.is_server_down
        or row.is_cordoned
        or isinstance(row.load_unknown, UnknownLoadRow)
        or isinstance(row.closed, ClosedRow)
        or (row.gpus_out is not UNSET and bool(row.gpus_out))
    )


def _groups(nodes: Sequence[NodeRow]) -> list[tuple[str, str, list[NodeRow]]]:
    """Nodes by pool and service: a key, a title, and the nodes by name."""
    by_key: dict[tuple[str, str], list[NodeRow]] = {}
    for row in nodes:
        service = row.service if row.home_pool == Pool.INFERENCE else ""
        by_key.setdefault((row.home_pool, service), []).append(row)
    found: list[tuple[str, str, list[NodeRow]]] = []
    for (pool, service), rows in sorted(by_key.items()):
        title = f"{pool}: {service}" if service else pool
        key = f"{pool}-{service}" if service else str(pool)
        found.append((key, title, sorted(rows, key=_natural)))
    return found


def _natural(row: NodeRow) -> list[tuple[int, str]]:
    """Names in the order of their numbers: node-9 before node-10."""
    parts = re.split(r"(\d+)", row.node)
    return [(int(part), "") if part.isdecimal() else (0, part) for part in parts]


def _service_of(rows: Sequence[NodeRow]) -> str:
    return rows[0].service if rows[0].home_pool == Pool.INFERENCE else ""


def _alerts(view: CellView) -> list[tuple[str, str]]:
    """What an operator should know first, in words of `aryl status`."""
    status = view.status
    glance = dict(plain_text.glance(status))
    found: list[tuple[str, str]] = []
    if status.is_frozen:
        found.append(("frozen", glance["policy"]))
    if status.recalled_services or status.is_recalled is True:
        found.append(("recall", glance["on loan"]))
    if status.loads_unknown is not UNSET:
        found.append(("load unknown", ", ".join(status.loads_unknown)))
    late = [row for row in view.loans if row.is_late]
    if late:
        found.append(("late", f"{counted(len(late), 'loan')} past the reclaim deadline"))
    if status.stalled_jobs is not UNSET and status.stalled_jobs:
        found.append(("stalled", f"{counted(status.stalled_jobs, 'running job')} without progress"))
    found += [(name, glance[name]) for name in ("no room", "faults", "overload", "clock")
              if name in glance]  # fmt: skip
    return found


def _deadline_at_s(row: LoanRow) -> float:
    if row.reclaim_ordered_at_s is None or row.reclaim_deadline_s is None:
        return float("inf")
    return row.reclaim_ordered_at_s + row.reclaim_deadline_s


def _kind_of(line: StoryRow, nodes: frozenset[str], services: Mapping[str, ServiceRow]) -> str:
    """The kind of page that an event's subject has; empty: none."""
    if line.subject == "cell":
        return ""
    if line.subject in nodes:
        return "node"
    return "service" if line.subject in services else "job"


def _job_key(row: JobRow) -> str:
    return row.job_id


def _loan_key(row: LoanRow) -> str:
    return row.lease_id


def _node_key(row: NodeRow) -> str:
    return row.node
