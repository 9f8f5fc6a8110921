"""Counts and sizes of `sbatch`'s options: nodes, GPUs with a type, memory. Pure."""

from __future__ import annotations

import re

from common.errors import ConfigError

_MEMORY = re.compile(r"(\d+)([KMGT]?)(?:i?B)?", re.ASCII | re.IGNORECASE)
_BYTES = {"K": 1 << 10, "": 1 << 20, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}
_GPUS = re.compile(r"(?:(?P<kind>[^:=,]+)[:=])?(?P<count>\d+)|(?P<only>[^:=,]+)", re.ASCII)
_GRES = re.compile(r"(?:gres/)?gpu(?:[:=](?P<rest>.+))?", re.ASCII)
MAX_COUNT = 100_000


def count(name: str, text: str, *, least: int = 1) -> int:
    """A whole number; ConfigError names the option."""
    if not (text.isascii() and text.isdecimal()) or not least <= int(text) <= MAX_COUNT:
        raise ConfigError(f"--{name}: {text!r}, expected a number of at least {least}")
    return int(text)


def count_range(name: str, text: str) -> tuple[int, int]:
    """`MIN` or `MIN-MAX`; ConfigError names the option."""
    low, dash, high = text.partition("-")
    found = count(name, low), count(name, high if dash else low)
    if found[0] > found[1]:
        raise ConfigError(f"--{name}: {text!r}, expected MIN-MAX with MIN up to MAX")
    return found


def memory_bytes(name: str, text: str) -> int:
    """`500`, `4G` or `4GB` in bytes, megabytes without a unit; ConfigError names the option."""
    found = _MEMORY.fullmatch(text)
    if found is None:
        raise ConfigError(f"--{name}: {text!r}, expected a number with K, M, G or T")
    return int(found[1]) * _BYTES[found[2].upper()]


def gpus(name: str, text: str) -> tuple[str, int]:
    """GPUs of `[TYPE:]N`: the type, which may be empty, and the number."""
    found = _GPUS.fullmatch(text)
    if found is None:
        raise ConfigError(f"--{name}: {text!r}, expected N or TYPE:N")
    if found["only"]:
        return found["only"], 1
    return found["kind"] or "", count(name, found["count"], least=0)


def gres(text: str) -> tuple[str, int] | None:
    """GPUs of `--gres`; None: `none`, which asks for nothing.

    Raises:
        ConfigError: a resource that is no GPU.
    """
    wanted: tuple[str, int] | None = None
    for part in filter(None, text.split(",")):
        if part.lower() in ("none", "gpu:0", "gres/gpu:0"):
            continue
        found = _GRES.fullmatch(part)
        if found is None or wanted is not None:
            raise ConfigError(f"--gres: {part!r}, expected one gpu[:TYPE]:N; Aryl gives GPUs alone")
        wanted = gpus("gres", found["rest"] or "1")
    return wanted
