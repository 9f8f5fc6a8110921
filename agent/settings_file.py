"""Reads an agent's settings file: strictly for a start, leniently for a return from a loan.

A start checks the whole file before it touches anything. A return needs few settings and must not
fail for the rest, because the file may have changed while the node was lent. Nothing here changes a
state directory.
"""

from __future__ import annotations

import logging
import math
import os
from collections.abc import Generator
from contextlib import contextmanager, suppress
from pathlib import Path

from msgspec import structs

from agent.core.node_lifecycle import left_pool
from agent.core.state import Memory, is_away
from agent.settings import AgentSettings, Instance, InstanceSettings, ServerSettings, Starter
from agent.shim.files import is_locked
from agent.storage.accepted_settings import kept
from agent.storage.ledger import peek
from agent.storage.node_lock import lock_path
from agent.telemetry.engine_page_parser import checked_metrics
from agent.telemetry.engine_series import ENGINES, engine_named
from agent.telemetry.page_fetch import checked_access, checked_url, less_user
from agent.telemetry.server_processes import checked_units
from agent.workers import boot_check
from agent.workers.accounts import worker_account
from common import mqttrules, natsrules, node_labels
from common.clock import SystemClock
from common.decoding import parse_toml
from common.errors import ConfigError
from common.failure_rules import read_rules
from common.monitoring.checks import check as check_metrics
from common.monitoring.settings import warning as warning_of
from common.settings import drop_ins, load

log = logging.getLogger(__name__)

ENGINE = next(iter(ENGINES))
"""For a return by settings whose own engine is unknown."""


def checked(path: Path, *, uid: int | None = None) -> AgentSettings:
    """The settings of an agent that starts, or is to start.

    uid: the account that the agent runs as; None is this process's.

    Raises:
        ConfigError: they are inconsistent, or wrong for this machine; names file and field.
    """
    settings = load(path, AgentSettings)
    with _naming(path):
        settings.check()
        _check_node(settings)
        _check_jobs(settings, os.geteuid() if uid is None else uid)
        _check_server(settings)
        check_metrics(settings.metrics)
    if warning := warning_of(settings.metrics):
        log.warning("%s", warning)
    return settings


def check_state_dir(path: Path, settings: AgentSettings, state_dir: Path | None) -> None:
    """Check that a file and the command line name the same state directory.

    Raises:
        ConfigError: they differ, so an unreadable file would hide its node.
    """
    if state_dir is not None and not _is_same(Path(settings.state_dir), state_dir):
        raise ConfigError(
            f"{path}: state_dir: {settings.state_dir}, and --state-dir says {state_dir}"
        )


def check_rack(path: Path, settings: AgentSettings) -> None:
    """Check that jobs can select this node by its rack.

    Raises:
        ConfigError: the rack is no value of a label. Policies place by it all the same.
    """
    if why := node_labels.value_misfit("rack", settings.rack):
        raise ConfigError(f"{path}: rack: {why}")


def _is_same(one: Path, other: Path) -> bool:
    """True if both are one directory; unlike `Path.resolve`, no error if a link leads to itself."""
    return os.path.realpath(one) == os.path.realpath(other)


@contextmanager
def _naming(path: Path) -> Generator[None]:
    try:
        yield
    except ConfigError as error:
        raise ConfigError(f"{path}: {error}") from None


def _check_node(settings: AgentSettings) -> None:
    """Check that the state directory is this node's.

    Raises:
        ConfigError: it belongs to another node.
    """
    known = peek(Path(settings.state_dir)) or kept(Path(settings.state_dir))
    if known is not None and known.node != settings.node:
        raise ConfigError(f"node: {settings.node}, and state_dir belongs to node {known.node}")


def _check_jobs(settings: AgentSettings, uid: int) -> None:
    """Check what an agent would otherwise refuse later, with workers to start.

    Raises:
        ConfigError: names the field.
    """
    access = settings.access
    if bool(settings.nats_url) == bool(settings.mqtt_url):
        raise ConfigError("nats_url: expected it or mqtt_url, one of the two")
    if settings.mqtt_url:
        mqttrules.servers_of(settings.mqtt_url, access=access, insecure=settings.insecure)
    else:
        natsrules.server_urls(settings.nats_url, access=access, insecure=settings.insecure)
    # Seed and credentials may exist for the agent's unit alone, and only while that runs.
    natsrules.options(structs.replace(access, nkey_seed_path=None, credentials_path=None))
    read_rules(settings.failure_rules)
    worker_account(settings.job_user, uid=uid, is_root_allowed=settings.is_root_allowed)
    if settings.worker_starter == Starter.SYSTEMD:  # other starters inherit this process's view
        boot_check.check(SystemClock().boot_id())


def _check_server(settings: AgentSettings) -> None:
    """Check settings under which an agent would never get an answer.

    Raises:
        ConfigError: names the field.
    """
    server = settings.server
    if server is None:
        return
    if warning := settings.warning():
        log.warning("%s", warning)
    if server.instances:
        for name in ("health_url", "metrics_url"):
            if getattr(server, name):
                raise ConfigError(f"server.{name}: stands in each of server.instances instead")
    for instance in server.all_instances():
        _check_instance(instance, may_be_plain=settings.insecure)
    checked_units(server.units)


def _check_instance(one: Instance, *, may_be_plain: bool) -> None:
    """As `_check_server`, for one of its servers."""
    engine_named(one.engine)
    if one.metrics is not None:
        checked_metrics(one.metrics, f"{one.field}.metrics")
    has_command = one.metrics is not None and bool(one.metrics.command)
    urls = {"health_url": one.health_url, "metrics_url": one.metrics_url}
    for name, url in urls.items():
        field = f"{one.field}.{name}"
        if name == "metrics_url" and has_command:
            if url:
                raise ConfigError(f"{field}: {one.field}.metrics.command is asked instead")
            continue
        if not url:
            raise ConfigError(f"{field}: is required and missing")
        checked_url(url, field)
        checked_access(one.access, f"{one.field}.access", url=url, may_be_plain=may_be_plain)


# --- settings of a return -------------------------------------------------------------------


def way_home(path: Path, *, state_dir: Path | None) -> AgentSettings:
    """The settings for `--go-home`, without anything about jobs.

    They are the file's if they fit this node and its server, else those that the node's agent
    accepted last. If it accepted none, they are the file's, provided that they are this node's. No
    failure rules are read and no account is looked up.

    state_dir: of the node, where the file names none; see `_home_dir` for where both name one.

    Raises:
        ConfigError: the file is invalid, and there is nothing else; names file and field.
    """
    try:
        settings, warning = _settings_in(_home_dir(path, state_dir), path)
    except ConfigError as error:
        hint = "" if state_dir else "; its agent's last ones are used with --state-dir DIR"
        raise ConfigError(f"{error}{hint}") from None
    if warning:
        log.warning("%s", warning)
    return settings


def expected_homes(path: Path, *, state_dir: Path | None) -> list[AgentSettings]:
    """The result of `way_home` now for each node whose state directory is named, without logging.

    A node for which it would fail is left out. The file's node is the last.
    """
    found: list[AgentSettings] = []
    for where in reversed(_less_copies(_named_dirs(path, state_dir))):
        with suppress(ConfigError):
            found.append(_settings_in(where, path)[0])
    return found


def _settings_in(where: Path | None, path: Path) -> tuple[AgentSettings, str]:
    """The settings on which the node in this state directory returns, and a warning, usually empty.

    The warning gives the reason why they are not the file's, or that they do not fit.

    Raises:
        ConfigError: as `way_home`.
    """
    told, warning = None, ""
    try:
        read = load(path, AgentSettings)
        with _naming(path):
            read.check()
            _check_place(read, where)
            told = read
            _check_server(read)
    except ConfigError as error:
        last, warning = _accepted(where), str(error)
        if last is not None:
            warning += "; the node returns with the settings that its agent accepted last"
            told = last
        elif told is None:
            raise
    return _for_way_home(told), warning


def _home_dir(path: Path, state_dir: Path | None) -> Path | None:
    """The state directory of the node that is to come home; None: neither source names one.

    A unit may name another directory than a site's file, and a file may have been changed. So the
    directory of a node that is away comes first, else that of any node. If both nodes are away it
    is the command line's: a last resort names the node that it was armed for. If both are at home
    it is the file's.
    """
    named = _less_copies(_named_dirs(path, state_dir))
    for where in reversed(named):
        memory = peek(where)
        if memory is not None and is_away(memory):
            return where
    known = [where for where in named if os.path.lexists(where / "ledger") or kept(where)]
    return next(iter(known or named), None)


def _named_dirs(path: Path, state_dir: Path | None) -> list[Path]:
    """The state directories that a file and the command line name, in this order."""
    named = [where for where in (_named_state_dir(path), state_dir) if where is not None]
    return named[:1] if len(named) > 1 and _is_same(*named) else named


def _less_copies(named: list[Path]) -> list[Path]:
    """The same without copies of one node's directory, where both show that their node is away.

    It is one node, and at most one of the directories knows of its present loan. A return by the
    other would end a job whose lease is being renewed.
    """
    known = [(where, memory) for where in named if (memory := peek(where)) is not None]
    away = [(where, memory) for where, memory in known if is_away(memory)]
    if len(away) < 2 or len({memory.node for _, memory in away}) > 1:
        return named
    of = [memory for _, memory in away]
    # Of equals the file's, which comes first.
    true, _ = max(away, key=lambda one: _how_new(one[0], one[1], of))
    return [true]


def _how_new(where: Path, memory: Memory, of: list[Memory]) -> tuple[bool, int, int, bool, float]:
    """A sort key: the greater, the later this state of the node's copies was in use.

    A process that works on the node has it locked, and a coordinator counts its orders. A lease
    that is renewed, or ends, counts nothing. Without a count, only a copy that names the
    other's lease as ended is later: a node that starts, or leaves its routing, has none yet.
    """
    ends_at_s = memory.lease_ends_at_s
    is_held = is_locked(str(lock_path(where)))
    leases = {other.lease.lease_id for other in of if other.lease is not None}
    has_ended = not leases.isdisjoint(memory.ended_leases)
    until_s = -math.inf if ends_at_s is None else ends_at_s
    return is_held, memory.epoch, memory.generation, has_ended, until_s


def _accepted(where: Path | None) -> AgentSettings | None:
    """The settings that the agent of the node in this state directory accepted last; None: unknown.

    An agent may have accepted settings that its ledger never had, as a move to another pool.
    """
    if where is None or (last := kept(where)) is None:
        return None
    # The file may name another path to it, from before a move of the directory or from a container.
    last = structs.replace(last, state_dir=str(where.absolute()))
    memory = peek(where)
    if memory is None:
        return last
    is_of_node = memory.node == last.node and left_pool(memory, last.home_pool) is None
    return last if is_of_node else None


def _check_place(settings: AgentSettings, where: Path | None) -> None:
    """Check that the settings are of the node in this state directory, and of its loan.

    Raises:
        ConfigError: they are of another node. Then nothing would be known of the loan, or nothing
            would end it.
    """
    if where is None:
        return
    if not _is_same(Path(settings.state_dir), where):
        raise ConfigError(f"state_dir: {settings.state_dir}, and the node's is {where}")
    _check_node(settings)
    memory, last = peek(where), _accepted(where)
    pool = None if memory is None else left_pool(memory, settings.home_pool)
    if memory is None and last is not None and last.home_pool != settings.home_pool:
        pool = last.home_pool
    if pool is not None:
        raise ConfigError(f"home_pool: {settings.home_pool}, and the node is of the {pool} pool")
    if last is not None and last.service != settings.service:
        raise ConfigError(f"service: {settings.service}, and the node is of {last.service}")


def _named_state_dir(path: Path) -> Path | None:
    """The last `state_dir` in the file and its drop-ins, as far as they are TOML."""
    named: object = None
    for file in (path, *drop_ins(path)):
        with suppress(OSError, ValueError):
            named = parse_toml(file.read_text(encoding="utf-8")).get("state_dir", named)
    return Path(named) if isinstance(named, str) and named and "\0" not in named else None


def _for_way_home(settings: AgentSettings) -> AgentSettings:
    """The settings without those that a return does not need; no worker starts during a return.

    A page whose settings are invalid costs only the load on it, which a return does not report. A
    password in a URL is not sent, and would make the agent refuse the URL.
    """
    server = settings.server
    return structs.replace(
        settings,
        server=None if server is None else _server_for_way_home(server),
        failure_rules="",
        job_user="",
        is_root_allowed=False,
    )


def _server_for_way_home(server: ServerSettings) -> ServerSettings:
    try:
        for one in server.all_instances():
            engine_named(one.engine)
            if one.metrics is not None:
                checked_metrics(one.metrics, one.field)
    except ConfigError:
        server = structs.replace(
            server,
            metrics_url="",
            engine=ENGINE,
            metrics=None,
            instances=tuple(
                InstanceSettings(health_url=one.health_url, access=one.access)
                for one in server.instances
            ),
        )
    with suppress(ValueError):
        server = structs.replace(
            server,
            health_url=less_user(server.health_url),
            metrics_url=less_user(server.metrics_url),
            instances=tuple(
                structs.replace(
                    one,
                    health_url=less_user(one.health_url),
                    metrics_url=less_user(one.metrics_url),
                )
                for one in server.instances
            ),
        )
    return server
