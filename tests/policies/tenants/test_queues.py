"""Down the tree of tenants: who is next is decided level by level, among siblings alone."""

from __future__ import annotations

from msgspec.structs import replace

from coordinator.policies.contract.snapshot import ClusterSnapshot, TenantView
from coordinator.policies.tenants.queues import Tree
from coordinator.policies.tenants.tree import ITSELF, NOBODY
from tests.harness.builders import make_job_view, make_snapshot
from tests.tables import each_row

TENANTS = (
    TenantView(name="a", weight=2.0),
    TenantView(name="b"),
    TenantView(name="a1", parent="a"),
    TenantView(name="a2", parent="a", weight=3.0),
    TenantView(name="a21", parent="a2"),
    TenantView(name="b1", parent="b"),
)


def cell(*owners: str, tenants: tuple[TenantView, ...] = TENANTS) -> ClusterSnapshot:
    """A job of each of these tenants."""
    jobs = [replace(make_job_view(f"j{n}"), tenant=owner) for n, owner in enumerate(owners)]
    return replace(make_snapshot(jobs=jobs), tenants=tenants)


def next_of(tree: Tree, keys: dict[str, float], *names: str) -> str:
    """Who of these is next."""
    return tree.first(dict.fromkeys(names, 0.0), lambda each: keys.get(each, 0.0))


def test_the_outer_level_decides_first() -> None:
    """Whoever is part of the one that has less is next, whatever it has itself."""
    tree = Tree(cell())
    assert next_of(tree, {"a": 2.0, "b": 1.0, "b1": 9.0}, "a1", "b1") == "b1"
    assert next_of(tree, {"a": 1.0, "b": 1.5, "a1": 5.0, "a2": 4.0}, "a1", "a21", "b1") == "a21"


def test_equals_go_by_submission_at_each_level() -> None:
    """Of organisations with as much it is the one with a team whose job was submitted first, and of
    its teams with as much the one that has that job; teams elsewhere are no matter then."""
    tree, nothing = Tree(cell()), dict[str, float]()

    def first(keys: dict[str, float], **heads: float) -> str:
        return tree.first(heads, lambda each: keys.get(each, 0.0))

    assert first(nothing, a1=9.0, a21=8.0, b1=7.0) == "b1"
    assert first(nothing, a1=9.0, a21=6.0, b1=7.0) == "a21"
    assert first({"a21": 1.0}, a1=9.0, a21=6.0, b1=7.0) == "a21"  # `a2` has as little as `a1`
    assert first({"a2": 1.0}, a1=9.0, a21=6.0, b1=7.0) == "a1"
    assert first({"a": 1.0}, a1=9.0, a21=6.0, b1=7.0) == "b1"
    # In whatever order their lines are read: `a1` speaks for `a` though `a21` comes after it.
    assert first(nothing, a1=6.0, a21=9.0, b1=7.0) == "a1"
    assert first({"a1": 1.0}, a1=6.0, a21=9.0, b1=7.0) == "a21"


def test_equals_of_one_time_go_by_name_at_each_level() -> None:
    """Of `a` and `b` it is `a`, and in it the one with least."""
    tree = Tree(cell())
    assert next_of(tree, {"a1": 1.0, "a2": 2.0}, "b1", "a21", "a1") == "a1"
    assert next_of(tree, {}, "b1", "a21", "a1") == "a1"


def test_who_has_nobody_to_serve_is_passed_by() -> None:
    """Its part goes to its siblings first: `a` has least, so somebody of `a` is next."""
    tree = Tree(cell())
    assert next_of(tree, {"b": 1.0, "a2": 7.0}, "b1", "a21") == "a21"
    assert next_of(tree, {"b": 1.0}, "b1") == "b1"


def test_jobs_of_a_tenant_with_parts_are_one_part_more() -> None:
    """Under the name that the jobs give, and under that of where they are counted."""
    tree = Tree(cell("a", "a1"))
    assert tree.path("a") == tree.path("a" + ITSELF) == ("a" + ITSELF, "a")
    assert tree.children["a"] == ["a" + ITSELF, "a1", "a2"]
    assert (tree.weights["a"], tree.weights["a" + ITSELF]) == (2.0, 1.0)
    assert next_of(tree, {"a1": 1.0}, "a", "a1") == "a"


def test_jobs_without_a_tenant_are_nobody_s() -> None:
    """They stand beside the others, and before them where they have as much."""
    tree = Tree(cell("", "b1"))
    assert tree.path("") == (NOBODY,)
    assert next_of(tree, {}, "b1", "") == ""


def test_one_level_is_an_order_by_key_and_name() -> None:
    """Without parents it is as if there were no tree."""
    tree = Tree(cell("x", "y", "z", tenants=(TenantView(name="x"),)))
    assert tree.depth == 1
    assert next_of(tree, {"x": 1.0}, "x", "z", "y") == "y"
    assert Tree(cell()).depth == 3


@each_row(
    ("pair", "found"),
    [
        (("a1", "b1"), ("a", "b")),
        (("a21", "a1"), ("a2", "a1")),
        (("a1", "a"), ("a1", "a" + ITSELF)),
        (("", "a21"), (NOBODY, "a")),
    ],
)
def test_two_tenants_are_compared_where_their_paths_part(
    pair: tuple[str, str], found: tuple[str, str]
) -> None:
    """As the siblings that they are there, or are part of."""
    assert Tree(cell("", "a")).parting(*pair) == found
