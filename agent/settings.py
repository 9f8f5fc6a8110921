"""The agent's settings file; every duration has its unit in its name."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct, field

from common import node_labels
from common.errors import ConfigError
from common.model import (
    NatsAccess,
    NonNegativeFloat,
    NonNegativeInt,
    Pool,
    PositiveFloat,
    Ratio,
    Token,
)
from common.monitoring.settings import AgentMetricsSettings

Argv = tuple[str, ...]
SHORTEST_HUNG_S = 2.0
"""Several heartbeats of `agent.storage.node_lock`."""
LONGEST_STRANGER_AFTER_S = 60.0
"""A loan waits for this long to see which processes stay, and for a crash loop several times as
long."""


WORKERS_DIR = "workers"
"""The directories of workers, below `state_dir`."""


class Starter(StrEnum):
    """How a worker's shim, or the last resort, is started."""

    SYSTEMD = "systemd"
    DETACHED = "detached"


class KernelLogChoice(StrEnum):
    """Where the kernel log is read, for the XIDs that NVML does not report."""

    AUTO = "auto"
    JOURNAL = "journal"
    KMSG = "kmsg"
    OFF = "off"


class Combine(StrEnum):
    """How the label sets of a series combine into one number."""

    SUM = "sum"
    MAX = "max"


class CountSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One number of a page: a series of Prometheus' text format, or a place in a JSON document."""

    series: Annotated[
        tuple[str, ...],
        Meta(description="series name; of several names, the first one on the page is used"),
    ] = ()
    labels: Annotated[
        dict[str, str],
        Meta(
            description="labels a sample needs to be counted; `*` matches any value, an empty "
            "text a missing label"
        ),
    ] = {}
    copies: Annotated[
        tuple[str, ...],
        Meta(
            description="labels that mark copies of one number, such as the rank; of the "
            "copies, the largest counts"
        ),
    ] = ()
    by: Annotated[
        tuple[str, ...],
        Meta(
            description="label sets with equal values of these labels are added up before `combine`"
        ),
    ] = ()
    combine: Annotated[
        Combine,
        Meta(description="sum or max over the label sets, or over the places that match `path`"),
    ] = Combine.SUM
    path: Annotated[
        str,
        Meta(
            description="JSON pointer instead of a series, e.g. /stats/running; `*` matches "
            "each item of a list or object"
        ),
    ] = ""
    optional: Annotated[
        bool, Meta(description="true: a page without it counts as 0; false: the load is unknown")
    ] = False


class MetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests in flight and requests succeeded, by the server's own series names.

    The values of each list are added up. `engine` names a preset.
    """

    running: Annotated[
        tuple[CountSettings, ...], Meta(description="requests the server is processing")
    ] = ()
    waiting: Annotated[
        tuple[CountSettings, ...],
        Meta(description="requests in the queue; none: `running` counts them too"),
    ] = ()
    succeeded: Annotated[
        tuple[CountSettings, ...],
        Meta(description="requests completed since the server started; a counter"),
    ] = ()
    kv_cache: Annotated[
        tuple[CountSettings, ...],
        Meta(
            description="share of the KV cache in use, 0 to 1; the largest is shown, no "
            "decision uses it"
        ),
    ] = ()
    command: Annotated[
        Argv,
        Meta(
            description="command instead of a page: prints a JSON object of running, waiting and "
            "succeeded; run without a shell, as the agent's user, for each report"
        ),
    ] = ()


class PageAccess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the agent authenticates to a page, and which servers it trusts.

    It holds paths only, no key.
    """

    bearer_path: Annotated[
        str, Meta(description="file with a key that is sent as `Authorization: Bearer`; mode 0600")
    ] = ""
    basic_path: Annotated[
        str,
        Meta(
            description="file with user:password that is sent as `Authorization: Basic`; mode 0600"
        ),
    ] = ""
    tls_ca_path: Annotated[
        str, Meta(description="CA certificates for https, trusted instead of the system's")
    ] = ""


class InstanceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several servers on a node; keys that it lacks are as in `server`."""

    health_url: Annotated[str, Meta(description="URL that answers 200 when this server can serve")]
    metrics_url: Annotated[
        str, Meta(description="metrics page of this server; none: `command` of its metrics is run")
    ] = ""
    engine: Annotated[str | None, Meta(description="as server.engine")] = None
    metrics: Annotated[MetricsSettings | None, Meta(description="as server.metrics")] = None
    access: Annotated[PageAccess | None, Meta(description="as server.access")] = None


class Instance(Struct, frozen=True, kw_only=True):
    """One server of a node, with all its settings; `field` is its place in the settings."""

    field: str
    health_url: str
    metrics_url: str
    engine: str
    metrics: MetricsSettings | None
    access: PageAccess


class ServerSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The inference server of this node, or several, and the commands that move them all.

    A command is run without a shell, must be idempotent, and reports success by exit code 0. Its
    environment has ARYL_NODE, ARYL_SERVICE and ARYL_GPU_UUIDS (with commas between).
    """

    health_url: Annotated[
        str,
        Meta(
            description="URL that answers 200 when the server can serve; required, unless there "
            "are `instances`"
        ),
    ] = ""
    metrics_url: Annotated[
        str,
        Meta(description="metrics page of the server; required, unless a command is set"),
    ] = ""
    engine: Annotated[
        str,
        Meta(
            description="vllm, sglang, triton, trtllm, dynamo, nim, llamacpp or tgi: the engine "
            "whose metric names are read; `metrics` replaces it"
        ),
    ] = "vllm"
    metrics: Annotated[
        MetricsSettings | None, Meta(description="metric names of another engine, or a command")
    ] = None
    access: Annotated[
        PageAccess,
        Meta(description="keys and certificates for the metrics page and the health check"),
    ] = PageAccess()
    instances: Annotated[
        tuple[InstanceSettings, ...],
        Meta(
            description="several servers on this node, instead of `health_url` and `metrics_url`: "
            "their loads are added up, and all must be healthy"
        ),
    ] = ()
    units: Annotated[
        tuple[str, ...],
        Meta(
            description="systemd units, scopes or slices of the server; GPU processes in them "
            "belong to it. None: the process that listens on the port of a "
            "health_url, with its descendants, session and control group"
        ),
    ] = ()
    start: Annotated[Argv, Meta(min_length=1, description="start the server")]
    stop: Annotated[
        Argv, Meta(min_length=1, description="stop the server; returns when it has exited")
    ]
    route: Annotated[Argv, Meta(min_length=1, description="send requests to this node again")]
    unroute: Annotated[Argv, Meta(min_length=1, description="send no new requests to this node")]
    hook_timeout_s: Annotated[
        PositiveFloat,
        Meta(description="a command that takes longer is killed and counts as failed"),
    ] = 60.0

    def all_instances(self) -> tuple[Instance, ...]:
        """Each server of the node, with the values that it takes from this table."""
        if not self.instances:
            return (
                Instance(
                    field="server",
                    health_url=self.health_url,
                    metrics_url=self.metrics_url,
                    engine=self.engine,
                    metrics=self.metrics,
                    access=self.access,
                ),
            )
        return tuple(
            Instance(
                field=f"server.instances[{number}]",
                health_url=one.health_url,
                metrics_url=one.metrics_url,
                engine=one.engine or self.engine,
                # An engine of its own is named to be read by it.
                metrics=one.metrics or (None if one.engine else self.metrics),
                access=one.access or self.access,
            )
            for number, one in enumerate(self.instances)
        )


class AgentSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One agent of one node."""

    cell: Annotated[Token, Meta(description="name of the cell; part of every subject")]
    node: Annotated[Token, Meta(description="name of this node in the cell")]
    home_pool: Annotated[Pool, Meta(description="training or inference")]
    state_dir: Annotated[
        str,
        Meta(
            min_length=1,
            description="directory of the ledger and the workers; must survive a reboot",
        ),
    ]
    nats_url: Annotated[
        str,
        Meta(description="nats://host:port or tls://host:port; required, unless `mqtt_url` is set"),
    ] = ""
    mqtt_url: Annotated[
        str,
        Meta(
            description="mqtt://host:port or mqtts://host:port of nats-server's MQTT listener, "
            "for a site that allows no other protocol; replaces `nats_url`"
        ),
    ] = ""
    insecure: Annotated[bool, Meta(description="allow a plain-text URL off loopback")] = False
    access: Annotated[NatsAccess, Meta(description="keys and certificates for the NATS server")] = (
        NatsAccess()
    )
    rack: Annotated[
        str,
        Meta(description="rack or switch of this node; `philly` and other policies place by it"),
    ] = ""
    labels: Annotated[
        dict[str, str],
        Meta(
            description="labels of this node, by which jobs select it; an empty value is a bare "
            "flag, such as `nvlink`; `rack` is one by itself"
        ),
    ] = field(default_factory=dict[str, str])
    service: Annotated[
        Token | None, Meta(description="inference service of this node; none in training")
    ] = None
    server: Annotated[
        ServerSettings | None, Meta(description="the inference server; none in training")
    ] = None
    advertised_host: Annotated[
        str,
        Meta(min_length=1, description="host name or address that gangs use for their rendezvous"),
    ] = "127.0.0.1"
    report_period_s: Annotated[PositiveFloat, Meta(description="time between two reports")] = 1.0
    step_period_s: Annotated[
        PositiveFloat,
        Meta(
            description="time between two checks while a worker, a lease or the server is in "
            "transition"
        ),
    ] = 0.25
    collect_deadline_s: Annotated[
        PositiveFloat,
        Meta(description="a collector that takes longer counts as failed for this report"),
    ] = 2.0
    unread_page_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description="a draining server gets requests again if its metrics page cannot be "
            "read for this long, as it may still have requests"
        ),
    ] = 60.0
    kernel_log: Annotated[
        KernelLogChoice,
        Meta(
            description="where XIDs are read besides NVML: journal, kmsg (/dev/kmsg) or off; "
            "auto: the first one this account can read"
        ),
    ] = KernelLogChoice.AUTO
    device_free_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description="a GPU that is still busy this long after its last worker ended: quarantine"
        ),
    ] = 60.0
    unresponsive_gpu_wait_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a returning server waits this long for a GPU that does not answer, then "
            "starts without it; keep it below the cell's `device_free_p99_s`"
        ),
    ] = 5.0
    device_free_memory_ratio: Annotated[
        Ratio, Meta(description="a GPU with a smaller share of its memory in use counts as free")
    ] = 0.05
    stranger_after_s: Annotated[
        PositiveFloat,
        Meta(
            description="a foreign GPU process seen for this long keeps its node from being "
            "lent, as do several in a row on one GPU for five times as long; a "
            "shorter one, such as a diagnostic, only delays the loan; at most 60"
        ),
    ] = 2.0
    warm_up_timeout_s: Annotated[
        PositiveFloat, Meta(description="a server that is not healthy after this time: quarantine")
    ] = 900.0
    quarantine_s: Annotated[
        NonNegativeFloat, Meta(description="shortest stay in quarantine before the next attempt")
    ] = 60.0
    vacate_grace_s: Annotated[
        NonNegativeFloat,
        Meta(description="longest grace of a worker when the node must return to its service"),
    ] = 60.0
    kept_logs_count: Annotated[
        NonNegativeInt,
        Meta(
            description="number of ended workers whose logs are kept; the oldest are deleted first"
        ),
    ] = 1000
    kept_logs_bytes: Annotated[
        NonNegativeInt,
        Meta(description="size of all kept logs together; a log larger than this is not kept"),
    ] = 1 << 30
    failure_rules: Annotated[
        str,
        Meta(
            description="TOML file with the site's own rules from log lines to failure classes; "
            "they go before the packaged rules"
        ),
    ] = ""
    worker_starter: Annotated[
        Starter, Meta(description="how workers are started: systemd or detached")
    ] = Starter.SYSTEMD
    job_user: Annotated[
        str,
        Meta(
            description="account that workers run as, if the agent runs as root; none: the "
            "agent's own"
        ),
    ] = ""
    is_root_allowed: Annotated[
        bool, Meta(description="let workers run as root; for a demo on a single-user machine")
    ] = False
    last_resort: Annotated[
        Starter, Meta(description="what runs --go-home when the agent is dead: systemd or detached")
    ] = Starter.SYSTEMD
    metrics: Annotated[AgentMetricsSettings, Meta(description="the agent's metrics page")] = (
        AgentMetricsSettings()
    )
    hung_after_s: Annotated[
        PositiveFloat,
        Meta(
            description="an agent that holds a lent node past its lease is killed by --go-home "
            "after no sign of life for this long, or for half of the lease's TTL"
        ),
    ] = 10.0

    def warning(self) -> str:
        """Settings that are allowed and yet may cost a promise, naming the fields; empty: none."""
        if self.server is None or self.server.hook_timeout_s <= self.device_free_timeout_s:
            return ""
        return (
            f"server.hook_timeout_s: {self.server.hook_timeout_s:g} is longer than"
            f" device_free_timeout_s ({self.device_free_timeout_s:g}): a stop command that is still"
            " running then is ended when the node must go home"
        )

    def check(self) -> None:
        """Check what types cannot express.

        Raises:
            ConfigError: names the field.
        """
        inference = self.home_pool == Pool.INFERENCE
        for name, value in (("service", self.service), ("server", self.server)):
            if inference and value is None:
                raise ConfigError(f"{name}: an inference node needs it (home_pool is inference)")
            if not inference and value is not None:
                raise ConfigError(f"{name}: a training node has none (home_pool is training)")
        if why := node_labels.misfit(self.labels):
            raise ConfigError(f"labels: {why}")
        if self.stranger_after_s > LONGEST_STRANGER_AFTER_S:
            raise ConfigError(
                f"stranger_after_s: {self.stranger_after_s:g} is longer than a loan should wait for"
                f" a process to leave, expected at most {LONGEST_STRANGER_AFTER_S:g}"
            )
        if self.hung_after_s < SHORTEST_HUNG_S:
            raise ConfigError(
                f"hung_after_s: {self.hung_after_s:g} is too short to tell a hung agent from a busy"
                f" one, expected at least {SHORTEST_HUNG_S:g}"
            )
