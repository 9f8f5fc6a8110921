"""The meaning of each GPU fault: the packaged catalogue, overridden by a site's own file.

An edge: reads files.
"""

from __future__ import annotations

import re
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Annotated, cast

import msgspec
from msgspec import Meta, Struct, field

from common.decoding import parse_toml
from common.errors import ConfigError
from coordinator.engine.state.events import FaultClass
from coordinator.service.nodes.gpu_facts import Catalogue, Entry

MAX_XID = 999_999
"""As many digits as the kernel log's reader takes."""

Words = Annotated[str, Meta(max_length=200)]


class SiteEntry(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One fault in a file; omitted fields are as in the packaged entry."""

    kind: FaultClass | None = field(default=None, name="class")
    meaning: Words | None = None
    owner: Words | None = None
    next_step: Words | None = None
    needs_repair: bool | None = None


class _File(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The content of a file."""

    xid: dict[str, SiteEntry] = field(default_factory=dict[str, SiteEntry])
    ecc: SiteEntry = SiteEntry()


@cache
def packaged() -> Catalogue:
    """The packaged catalogue."""
    data = resources.files("coordinator.service").joinpath("data", "gpu_faults.toml")
    return _read(data.read_text("utf-8"), "gpu_faults.toml", {}, Entry())


def read_catalogue(site_file: str = "") -> Catalogue:
    """The packaged catalogue, with a site's own entries over it.

    Raises:
        ConfigError: the site's file is missing, or one of its entries is invalid; names it.
    """
    known = packaged()
    if not site_file:
        return known
    try:
        text = Path(site_file).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"gpu_faults.catalogue: {site_file}: {error}") from None
    return _read(text, f"gpu_faults.catalogue: {site_file}", known.by_xid, known.ecc)


def _read(text: str, name: str, by_xid: dict[int, Entry], ecc: Entry) -> Catalogue:
    """A file's entries over those that are known."""
    try:
        file = msgspec.convert(parse_toml(text), _File)
    except msgspec.ValidationError as error:
        raise ConfigError(f"{name}: {_where(text)}{error}") from None
    except ValueError as error:
        raise ConfigError(f"{name}: not TOML: {error}") from None
    found = dict(by_xid)
    for key, entry in file.xid.items():
        if not re.fullmatch(r"0|[1-9][0-9]{0,5}", key):
            raise ConfigError(f"{name}: xid.{key}: expected a number up to {MAX_XID}")
        if int(key) not in found and entry.kind is None:
            raise ConfigError(f"{name}: xid.{key}: class: is required, as no other entry has it")
        found[int(key)] = _over(found.get(int(key), Entry()), entry)
    return Catalogue(by_xid=found, ecc=_over(ecc, file.ecc))


def _where(text: str) -> str:
    """The first invalid entry of a file, for an error that does not name it."""
    xids = cast("object", parse_toml(text).get("xid"))
    entries = cast("dict[str, object]", xids) if isinstance(xids, dict) else {}
    for key, entry in entries.items():
        try:
            msgspec.convert(entry, SiteEntry)
        except msgspec.ValidationError:
            return f"xid.{key}: "
    return ""


def _over(known: Entry, site: SiteEntry) -> Entry:
    given = {
        name: value
        for name in SiteEntry.__struct_fields__
        if (value := getattr(site, name)) is not None
    }
    return msgspec.structs.replace(known, **given)
