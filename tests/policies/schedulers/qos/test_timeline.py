"""Free GPUs over time: kept in blocks, and told as if they were one list."""

from __future__ import annotations

import random
from functools import partial
from operator import le

from coordinator.policies.schedulers.qos.timeline import Piece, Timeline
from tests.policies.schedulers.qos.plain_line import FlatLine
from tests.tables import each_row

GPUS = 16
ENDS_S = 1000


def piece_of(chance: random.Random) -> Piece:
    """Whole seconds, so that many begin or end where others do; some are of no time at all."""
    start_s = chance.randrange(-20, ENDS_S)
    return Piece(float(start_s), float(start_s + chance.randrange(120)), chance.randint(1, 3))


def filled(seed: int, pieces: int) -> tuple[Timeline, FlatLine]:
    """Both ways to keep them: so many pieces were taken, and a third of them given back."""
    chance = random.Random(seed)
    blocks, flat = Timeline(0.0, GPUS), FlatLine(0.0, GPUS)
    for number in range(pieces):
        piece = piece_of(chance)
        blocks.take((piece,), 2)
        flat.take((piece,), 2)
        if number % 3 == 0:
            blocks.give((piece,), 2)
            flat.take((piece,), -2)
    return blocks, flat


@each_row("pieces", [0, 1, 5, 40, 300])
@each_row("seed", range(3))
def test_steps_are_those_of_one_list(seed: int, pieces: int) -> None:
    """Whatever was taken and given back, and however many blocks hold them."""
    blocks, flat = filled(seed, pieces)
    assert list(blocks.steps()) == list(zip(flat.times, flat.free, strict=True))
    assert [blocks.at(at_s) for at_s in flat.times] == flat.free
    again = Timeline.of(flat.times, flat.free)
    assert list(again.steps()) == list(blocks.steps())
    again.take((Piece(3.5, 777.5, 1),), 1)
    blocks.take((Piece(3.5, 777.5, 1),), 1)
    assert list(again.steps()) == list(blocks.steps())


@each_row("pieces", [0, 1, 5, 40, 300])
def test_what_is_free_in_a_time_is_that_of_one_list(pieces: int) -> None:
    """Spans from any instant to any other one, and whether a piece has room."""
    blocks, flat = filled(7, pieces)
    chance = random.Random(8)
    for _ in range(300):
        piece = piece_of(chance)
        needs = piece.workers * chance.choice((1, 3))
        assert blocks.has_room((piece,), needs // piece.workers) == flat.has_room(piece, needs)
        if piece.start_s >= 0 and piece.end_s > piece.start_s:
            found = blocks.spans(piece.start_s, piece.end_s)
            assert found == flat.spans(piece.start_s, piece.end_s)


@each_row("pieces", [0, 1, 5, 40, 300])
def test_room_is_found_at_the_first_step_that_has_it(pieces: int) -> None:
    """Behind any instant, for any number of GPUs and any time; none where whoever asks gives up."""
    blocks, flat = filled(9, pieces)
    chance = random.Random(10)
    for _ in range(200):
        after_s = chance.choice((*flat.times, -1.0, 0.5))
        gpus = chance.choice(flat.free) + chance.randint(-3, 1)
        lasts_s = chance.choice((1.0, 10.0, 75.0, 400.0))
        last_s = chance.choice((50.0, 500.0, 5000.0))

        def until_s(at_s: float, lasts_s: float = lasts_s, last_s: float = last_s) -> float | None:
            return at_s + lasts_s if at_s <= last_s else None

        fits = (
            at_s
            for at_s in flat.times
            if after_s < at_s <= last_s and flat.has_room(Piece(at_s, at_s + lasts_s, 1), gpus)
        )
        assert blocks.room_s(after_s, gpus, until_s) == next(fits, None)


@each_row("pieces", [0, 1, 5, 40, 300])
def test_the_first_step_for_which_something_holds_is_found(pieces: int) -> None:
    """Behind any instant, a step or not; none where it holds for no step."""
    blocks, flat = filled(11, pieces)
    for after_s in (-1.0, 0.0, 0.5, *flat.times[:: max(1, pieces // 9)], flat.times[-1]):
        for from_s in (-5.0, *flat.times[:: max(1, pieces // 9)], flat.times[-1], 2.0 * ENDS_S):
            later = (at_s for at_s in flat.times if at_s > after_s and at_s >= from_s)
            found = blocks.first_s(after_s, partial(le, from_s))
            assert found == next(later, None)


def test_room_of_one_step_is_found_wherever_it_is() -> None:
    """At the begin, in the middle and at the end of a block, with nothing free around it."""
    for hole in range(1, 80):
        line = Timeline.of([float(at) for at in range(80)], [int(at == hole) for at in range(80)])
        assert line.room_s(0.0, 1, lambda at_s: at_s + 1.0) == hole
        assert line.room_s(0.0, 1, lambda at_s: at_s + 1.5) == (79.0 if hole == 79 else None)
        assert line.room_s(hole, 1, lambda at_s: at_s + 1.0) is None
