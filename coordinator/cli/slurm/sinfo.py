"""`sinfo`: nodes by partition and state. A partition is a GPU type; `all` has every whole GPU."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence

from msgspec import Struct

from common.api import NodeRow
from common.slurm.nodelists import compress, expand
from common.slurm.options import FLAG, MAYBE, Kind, Option, OptionError
from coordinator.cli.slurm import cell, words
from coordinator.cli.slurm.cell import Place, put
from coordinator.cli.slurm.formats import Field, Format, of_letters

TABLE = (
    Option("Node", "N", FLAG),
    Option("noheader", "h", FLAG),
    Option("format", "o"),
    Option("long", "l", FLAG),
    Option("partition", "p"),
    Option("nodes", "n"),
    Option("states", "t"),
    Option("summarize", "s", FLAG),
    Option("exact", "e", FLAG, Kind.HARMLESS),
    Option("version", "V", FLAG),
    Option("help", "", FLAG),
    Option("usage", "", FLAG),
    Option("all", "a", FLAG, Kind.HARMLESS),
    Option("responding", "r", FLAG),
    Option("dead", "d", FLAG),
    Option("list-reasons", "R", FLAG),
    Option("hide", "", FLAG, Kind.HARMLESS),
    Option("local", "", FLAG, Kind.HARMLESS),
    Option("federation", "", FLAG, Kind.HARMLESS),
    Option("verbose", "v", FLAG, Kind.HARMLESS),
    Option("clusters", "M", kind=Kind.REFUSED, why="a command talks to one cell: set ARYL_CELL"),
    Option("Format", "O", kind=Kind.REFUSED, why="use -o"),
    Option("iterate", "i", kind=Kind.REFUSED, why="use watch(1), or aryl top"),
    Option("reservation", "T", FLAG, Kind.REFUSED, "Aryl keeps no reservations"),
    Option("sort", "S", kind=Kind.REFUSED, why="use sort(1)"),
    Option("json", "", MAYBE, Kind.REFUSED, "use aryl node list -o json"),
    Option("yaml", "", MAYBE, Kind.REFUSED, "use aryl node list -o json"),
)
DEFAULT = "%#P %.5a %.10l %.6D %.6t %N"
LONG = "%#P %.5a %.10l %.6D %.11T %#G %#f %N"
BY_NODE = "%#N %.6D %#P %6t"
BY_NODE_LONG = "%#N %.6D %#P %.11T %.5c %.8m %#G %#f %E"
SUMMARY = "%#P %.5a %.10l %.16F %N"
REASONS = "%40E %9u %19H %N"
HELP = """usage: sinfo [OPTION...]

List nodes by partition and state. A node that serves inference is reserved (resv); a lent one has
the state of its GPUs, and %f names the service that lends it.

  sinfo -N -o "%N %t %G %f"
"""


class Group(Struct, frozen=True):
    """Nodes of one partition that are alike."""

    partition: str
    rows: tuple[NodeRow, ...]

    @property
    def first(self) -> NodeRow | None:
        """Any of them: they are alike."""
        return next(iter(self.rows), None)


def _of_node(text: Callable[[NodeRow], str], missing: str = "n/a") -> Callable[[Group], str]:
    return lambda group: missing if group.first is None else text(group.first)


def _counts(group: Group) -> tuple[int, int, int, int]:
    """Allocated, idle and other nodes, and all."""
    found = [words.node_state(row) for row in group.rows]
    busy = sum(state in ("allocated", "mixed") for state in found)
    idle = found.count("idle")
    return busy, idle, len(found) - busy - idle, len(found)


def _mark(partition: str) -> str:
    return partition + ("*" if partition == words.DEFAULT_PARTITION else "")


def _cpus(row: NodeRow) -> str:
    return str(row.cpus) if isinstance(row.cpus, int) else "0"


def _memory(row: NodeRow) -> str:
    return str(row.memory_bytes >> 20) if isinstance(row.memory_bytes, int) else "0"


def why(row: NodeRow) -> str:
    """Why no job starts on a node, in Aryl's words."""
    return row.detail or "none"


COUNTED: Mapping[str, Field[Group]] = {
    "A": Field("NODES(A/I)", lambda group: "/".join(map(str, _counts(group)[:2]))),
    "D": Field("NODES", lambda group: str(len(group.rows))),
    "F": Field("NODES(A/I/O/T)", lambda group: "/".join(map(str, _counts(group)))),
    "N": Field("NODELIST", lambda group: compress(row.node for row in group.rows)),
}
"""Fields that count nodes; nodes are alike where all the other fields of a format are the same."""
PARTITIONS: Mapping[str, Field[Group]] = {
    "P": Field("PARTITION", lambda group: _mark(group.partition)),
    "R": Field("PARTITION", lambda group: group.partition),
    "p": Field("PARTITION", lambda group: group.partition),
}
"""Fields by which a node has a line in each of its partitions; in other formats it counts once."""
LETTERS: Mapping[str, Field[Group]] = {
    **COUNTED,
    **PARTITIONS,
    "E": Field("REASON", _of_node(why)),
    "G": Field("GRES", _of_node(words.node_gres)),
    "H": Field("TIMESTAMP", lambda group: "Unknown"),
    "L": Field("DEFAULTTIME", lambda group: "n/a"),
    "O": Field("CPU_LOAD", lambda group: "N/A"),
    "T": Field("STATE", _of_node(words.node_state)),
    "a": Field("AVAIL", lambda group: "up"),
    "b": Field("ACTIVE_FEATURES", _of_node(words.features)),
    "c": Field("CPUS", _of_node(_cpus)),
    "d": Field("TMP_DISK", lambda group: "0"),
    "e": Field("FREE_MEM", lambda group: "N/A"),
    "f": Field("AVAIL_FEATURES", _of_node(words.features)),
    "g": Field("GROUPS", lambda group: "all"),
    "h": Field("OVERSUBSCRIBE", lambda group: "NO"),
    "l": Field("TIMELIMIT", lambda group: "infinite"),
    "m": Field("MEMORY", _of_node(_memory)),
    "n": Field("HOSTNAMES", _of_node(lambda row: row.node)),
    "r": Field("ROOT", lambda group: "no"),
    "s": Field("JOB_SIZE", lambda group: "1-infinite"),
    "t": Field("STATE", _of_node(lambda row: words.NODE_COMPACT[words.node_state(row)])),
    "u": Field("USER", lambda group: "Unknown"),
    "w": Field("WEIGHT", lambda group: "1"),
}


def run(arguments: list[str], place: Place) -> int:
    """List nodes."""
    given, others = cell.options_of(arguments, TABLE)
    options = dict(given)
    if cell.is_about_itself(options, HELP):
        return 0
    if others:
        raise cell.stray(others)
    form = of_letters(_format(options, place), LETTERS)
    rows = _chosen(place.run(cell.nodes), options)
    wanted = [name.lower() for name in options.get("partition", "").split(",") if name]
    by_node = "Node" in options
    partitions = {
        name: members
        for name, members in by_partition(rows).items()
        if not wanted or name.lower() in wanted
    }
    if not by_node and not any(piece.field in PARTITIONS.values() for piece in form.pieces):
        partitions = _as_one(partitions)
    groups = [
        group
        for partition, members in partitions.items()
        for group in _groups(partition, members, form, by_node=by_node)
    ]
    form = form.fitted(groups)
    if "noheader" not in options:
        put(form.heading())
    for group in groups:
        put(form.line(group))
    return 0


def _format(options: Mapping[str, str], place: Place) -> str:
    if "format" in options:
        return options["format"]
    is_long = "long" in options
    if "list-reasons" in options:
        return REASONS
    if "Node" in options:
        return BY_NODE_LONG if is_long else BY_NODE
    if "summarize" in options:
        return SUMMARY
    return LONG if is_long else place.environ.get("SINFO_FORMAT") or DEFAULT


def _chosen(rows: Iterable[NodeRow], options: Mapping[str, str]) -> list[NodeRow]:
    """The nodes that the options leave.

    Raises:
        OptionError: a state that does not exist, or a list of nodes that is none.
    """
    states = {_state(name) for name in options.get("states", "").split(",") if name} - {"all"}
    try:
        names = set(expand(options.get("nodes", "")))
    except ValueError as error:
        raise OptionError(f"--nodes: {error}") from None
    allowed = states or set(words.NODE_COMPACT)
    if "list-reasons" in options:
        allowed &= {"down", "drained", "draining"}
    if "responding" in options:
        allowed -= {"down"}
    if "dead" in options:
        allowed &= {"down"}
    return [
        row for row in rows if words.node_state(row) in allowed and (not names or row.node in names)
    ]


def _state(name: str) -> str:
    by_short = {short: long for long, short in words.NODE_COMPACT.items()}
    long = by_short.get(name.lower(), name.lower())
    if long not in (*words.NODE_COMPACT, "all"):
        raise OptionError(f"Bad state string: {name}; expected {','.join(words.NODE_COMPACT)}")
    return long


def by_partition(rows: Iterable[NodeRow]) -> dict[str, list[NodeRow]]:
    """The nodes of each partition; the default one comes first, even where it has none."""
    found: dict[str, list[NodeRow]] = {words.DEFAULT_PARTITION: []}
    for row in rows:
        for name in words.node_partitions(row):
            found.setdefault(name, []).append(row)
    first, *rest = found
    return {first: found[first]} | {name: found[name] for name in sorted(rest)}


def _as_one(partitions: Mapping[str, list[NodeRow]]) -> dict[str, list[NodeRow]]:
    """The nodes of all partitions under the first one's name, each node once."""
    each = {row.node: row for members in partitions.values() for row in members}
    return {name: list(each.values()) for name in list(partitions)[:1]}


def _groups(
    partition: str, rows: Sequence[NodeRow], form: Format[Group], *, by_node: bool
) -> list[Group]:
    """Nodes that have the same text in all fields but the counted ones."""
    if not rows:
        return [] if by_node else [Group(partition, ())]
    fields = [piece.field for piece in form.pieces if piece.field not in COUNTED.values()]
    alike: dict[tuple[str, ...], list[NodeRow]] = {}
    for row in rows:
        alone = Group(partition, (row,))
        key = (row.node,) if by_node else tuple(field.text(alone) for field in fields)
        alike.setdefault(key, []).append(row)
    return [Group(partition, tuple(members)) for members in alike.values()]
