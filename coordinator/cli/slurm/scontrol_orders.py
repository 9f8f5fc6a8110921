"""`scontrol`'s orders: hold, release, requeue, and `update` of a job."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import msgspec

from common.api import Change, Done, Hold, Release, Requeue, Throttle
from common.arrays import MAX_TASKS
from common.errors import ConfigError
from common.jobspec import readable
from common.messages import Message
from common.slurm import times
from common.slurm.nodelists import expand
from common.slurm.options import OptionError
from coordinator.cli.slurm import cell, sizes
from coordinator.cli.slurm.cell import Place
from coordinator.cli.slurm.node_options import terms
from coordinator.cli.slurm.request import dependencies
from coordinator.client import Client

ORDERS: Mapping[str, Callable[[tuple[str, ...]], Message]] = {
    "hold": lambda jobs: Hold(job_ids=jobs),
    "uhold": lambda jobs: Hold(job_ids=jobs),
    "release": lambda jobs: Release(job_ids=jobs),
    "requeue": lambda jobs: Requeue(job_ids=jobs),
    "requeuehold": lambda jobs: Requeue(job_ids=jobs, is_held=True),
}
"""The request for each order about jobs."""
UPDATED = (
    "Priority, Nice, TimeLimit, NumNodes, Dependency, Features, ReqNodeList, ExcNodeList, "
    "ArrayTaskThrottle"
)
_THROTTLE = "arraytaskthrottle"
_LISTS = {"reqnodelist": "require_nodes", "excnodelist": "exclude_nodes"}


def order(command: str, names: Sequence[str], place: Place) -> int:
    """Carry out an order for some jobs."""
    jobs = [part for name in names for part in name.removeprefix("JobId=").split(",") if part]
    if not jobs:
        raise OptionError(f"{command}: expected a job")

    async def work(client: Client) -> int:
        await client.ask(ORDERS[command](tuple(jobs)), Done)
        return 0

    return place.run(work)


def update(words: Sequence[str], place: Place) -> int:
    """`update JobId=17 TimeLimit=2:00:00`: change a job that has not ended."""
    pairs = dict(_pair(word) for word in words)
    job = pairs.pop("jobid", pairs.pop("job", None))
    if job is None:
        raise OptionError("update: expected JobId=JOB; nodes and partitions belong to operators")
    if not pairs:
        raise OptionError(f"update: nothing to change; expected some of {UPDATED}")

    bound = pairs.pop(_THROTTLE, None)
    if bound is not None and pairs:
        raise OptionError("update: ArrayTaskThrottle stands alone, since it is an order of its own")

    async def work(client: Client) -> int:
        if bound is not None:
            await client.ask(_throttle(job, bound), Done)
            return 0
        values: dict[str, Any] = {"job_id": job}
        for key, text in pairs.items():
            values |= await _changed(client, key, text)
        await client.ask(_change(values), Done)
        return 0

    return place.run(work)


def _throttle(job: str, text: str) -> Throttle:
    """The most tasks of an array at once; 0: no bound. ConfigError: no count."""
    if not (text.isascii() and text.isdecimal() and int(text) <= MAX_TASKS):
        raise ConfigError(
            f"update: ArrayTaskThrottle: {text!r}, expected a count up to {MAX_TASKS}, or 0"
        )
    return Throttle(job_id=job, throttle=int(text) or None)


def _pair(word: str) -> tuple[str, str]:
    key, equals, value = word.partition("=")
    if not equals:
        raise OptionError(f"update: {word!r}, expected KEY=VALUE with a key of {UPDATED}")
    return key.lower(), value


async def _changed(client: Client, key: str, text: str) -> dict[str, Any]:
    """The field of the API for one key.

    Raises:
        OptionError: a key that cannot be changed.
        ConfigError: a value that does not fit.
    """
    try:
        match key:
            case "timelimit":
                return {"time_limit_s": times.limit_s(text)}
            case "priority":
                return {"priority": int(text)}
            case "nice":
                return {"priority": -int(text)}
            case "numnodes":
                low, high = sizes.count_range("NumNodes", text)
                return {"workers": {"min": low, "max": high}}
            case "dependency":
                parts = [part for one in text.split(",") for part in one.split(":")[1:]]
                ids = {part: (await cell.described(client, part)).name for part in parts}
                return {"depends_on": dependencies(text, ids) if text else []}
            case "features":
                return {"require": terms(text) if text else []}
            case "reqnodelist" | "excnodelist":
                return {_LISTS[key]: expand(text)}
            case _:
                raise OptionError(f"update: {key} cannot be changed; expected one of {UPDATED}")
    except ValueError as error:
        raise ConfigError(f"update: {key}: {error}") from None


def _change(values: Mapping[str, object]) -> Change:
    """A change of a job; ConfigError names a field that does not fit."""
    try:
        return msgspec.convert(values, Change)
    except msgspec.ValidationError as error:
        raise ConfigError(readable(str(error))) from None
