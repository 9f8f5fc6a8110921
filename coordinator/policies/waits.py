"""What waiting jobs wait for, in a word: data only."""

from __future__ import annotations

from msgspec import Struct

from common.model import JobId

FAIR_SHARE = "fair_share"
"""A kind of waiting: its tenant has what is its due (Philly study, ATC'19, section 3.1)."""
FRAGMENTATION = "fragmentation"
"""Another: its tenant is below its due, but its gang has no place with the locality it asks for."""

OTHERS_GUARANTEE = "others_guarantee"
"""Another: what it would take is covered by another tenant's guarantee, and it by none."""

GUARANTEE = "guarantee"
"""Another: its tenant's guarantee covers it, and what borrowers hold cannot be taken back now."""


class Wait(Struct, frozen=True, kw_only=True):
    """What some waiting jobs wait for until the next pass: one word of the policy's own."""

    kind: str
    jobs: tuple[JobId, ...]
