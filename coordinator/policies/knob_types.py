"""What several policies' knobs may be: lengths and parts with bounds. Must not know a policy.

No knob is ever infinite or NaN, whatever its type says; see `policy.turned`. "Never" is `null`.
"""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta

MAX_S = 1e9
"""Thirty years: longer than any job or cell, and exact to the microsecond as a float."""

MIN_PERIOD_S = 1e-3
"""As `--pass-period` has it: what comes again more often than that is nothing but passes."""

Period = Annotated[float, Meta(ge=MIN_PERIOD_S, le=MAX_S)]
"""Seconds after which something comes again, or ends."""

Seconds = Annotated[float, Meta(ge=0, le=MAX_S)]
"""A length that may be none."""

Part = Annotated[float, Meta(gt=0, le=1)]
"""A part that is not nothing."""
