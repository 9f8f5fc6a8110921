"""Progressive filling: each time one to the line that is next."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from coordinator.policies.schedulers.drf.policy import deal

LINES = st.dictionaries(st.sampled_from("abcd"), st.lists(st.integers(0, 3), max_size=3))


def dealt(lines: dict[str, list[int]]) -> tuple[str, dict[str, int]]:
    """In which order lines were given one each, and what each has: who stands there takes so
    many, and each time the line that has least is first."""
    order = ""
    has = dict.fromkeys(lines, 0)
    people: dict[str, list[list[object]]] = {
        name: [[name, most, 0] for most in line] for name, line in lines.items()
    }

    def give(person: list[object]) -> bool:
        nonlocal order
        name, most, had = str(person[0]), int(str(person[1])), int(str(person[2]))
        if had == most:
            return False
        person[2], has[name], order = had + 1, has[name] + 1, order + name
        return True

    deal(people, lambda names: min(names, key=lambda name: (has[name], name)), give)
    return order, has


def test_the_line_that_has_least_is_given_the_next_one() -> None:
    """Of equals the first by name; who takes no more does not hold up the others."""
    assert dealt({"b": [3], "a": [1], "c": [2]}) == ("abcbcb", {"a": 1, "b": 3, "c": 2})


def test_the_next_of_a_line_follows_the_one_that_takes_no_more() -> None:
    """Whoever is passed over has no turn any more, and who takes nothing is no obstacle."""
    assert dealt({"a": [1, 0, 2], "b": [1]}) == ("abaa", {"a": 3, "b": 1})


@given(LINES)
def test_everybody_is_given_all_that_it_takes(lines: dict[str, list[int]]) -> None:
    """And no line is given one while another that takes more has less."""
    order, has = dealt(lines)
    assert has == {name: sum(line) for name, line in lines.items()}
    given = dict.fromkeys(lines, 0)
    for name in order:
        open_ = [each for each in lines if given[each] < sum(lines[each])]
        assert given[name] == min(given[each] for each in open_)
        given[name] += 1
