"""No bytes make a decoder raise anything but its own error."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.decoders import Decoder, all_decoders
from tests.tables import each_row

DECODERS = all_decoders()

NASTY = (
    b"",
    b"\xff\xfe",
    b"\x00" * 64,
    b"\xa2\xff\xfe",  # MessagePack: text that is no UTF-8
    b"\x91" * 20_000,  # MessagePack: lists in each other
    b"\x81\xa1a" * 20_000,  # MessagePack: maps in each other
    b"\xdd\xff\xff\xff\xff",  # MessagePack: a list of four billion entries
    b"[" * 20_000,
    b'{"a":' * 20_000,
    b"a = " + b"[" * 5_000,
    b"a" + b".a" * 3_000 + b" = 1",
    b"a = " + b"9" * 5_000,
    b"a = 0x" + b"f" * 5_000,
    b"9" * 5_000,
    b"a: " + b"9" * 5_000,
    b"- " * 500,
    b'{"v": ' + b"9" * 5_000 + b"}",
    b"4," + b"9" * 5_000 + b",1,-;text",
    b'# TYPE a gauge\na{b="' + b"\\" * 5_000,
    b'"' * 4_001,
)
"""Inputs that have broken a decoder, of ours or of others."""


@each_row("name", DECODERS)
def test_a_decoder_takes_what_is_right(name: str) -> None:
    """The inputs that fuzzing begins with are valid, else it would only see the first check."""
    for seed in DECODERS[name].seeds:
        DECODERS[name].decode(seed)


@each_row("name", DECODERS)
def test_nasty_bytes_raise_a_decoders_own_error(name: str) -> None:
    """Bad UTF-8, depth, huge integers and lengths, alone and behind what is right."""
    decoder = DECODERS[name]
    for nasty in NASTY:
        _decode(decoder, nasty)
        for seed in decoder.seeds:
            _decode(decoder, seed + nasty)
            _decode(decoder, seed[: len(seed) // 2] + nasty + seed[len(seed) // 2 :])


@pytest.mark.slow
@settings(max_examples=300)
@given(data=st.data())
def test_changed_bytes_raise_a_decoders_own_error(data: st.DataObject) -> None:
    """A few changes of a valid input: bytes replaced, cut out, put in or doubled."""
    decoder = DECODERS[data.draw(st.sampled_from(sorted(DECODERS)))]
    seed = data.draw(st.sampled_from(decoder.seeds))
    _decode(decoder, data.draw(changed(seed)))


@st.composite
def changed(draw: st.DrawFn, seed: bytes) -> bytes:
    """`seed` with up to four changes."""
    found = bytearray(seed)
    for _ in range(draw(st.integers(1, 4))):
        start = draw(st.integers(0, len(found)))
        end = min(len(found), start + draw(st.integers(0, 8)))
        new = draw(
            st.one_of(
                st.binary(max_size=8),
                st.sampled_from(NASTY[:4]),
                st.just(bytes(found[start:end] * 2)),
            )
        )
        found[start:end] = new
    return bytes(found)


def _decode(decoder: Decoder, data: bytes) -> None:
    try:
        decoder.decode(data)
    except decoder.own:
        return
