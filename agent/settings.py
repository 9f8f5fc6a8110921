"""The agent's settings file; every duration has its unit in its name."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated

from msgspec import Meta, Struct

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
        Meta(description="name of a series; of several names the first that the page has counts"),
    ] = ()
    labels: Annotated[
        dict[str, str],
        Meta(
            description="labels that must have these values to count; `*` stands for anything, an"
            " empty text for no such label"
        ),
    ] = {}
    copies: Annotated[
        tuple[str, ...],
        Meta(
            description="labels in which only copies of a number differ, as of ranks that all tell"
            " the same requests: the largest of them counts"
        ),
    ] = ()
    by: Annotated[
        tuple[str, ...],
        Meta(description="label sets that are alike in these labels are added up before `combine`"),
    ] = ()
    combine: Annotated[
        Combine, Meta(description="sum or max of the label sets, or of the places that fit `path`")
    ] = Combine.SUM
    path: Annotated[
        str,
        Meta(
            description="instead of a series: JSON pointer, as /stats/running; `*` is each item of"
            " a list or object"
        ),
    ] = ""
    optional: Annotated[
        bool, Meta(description="a page that does not have it means 0; else its load is unknown")
    ] = False


class MetricsSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Requests in flight and requests succeeded, by the server's own series names.

    The values of each list are added up. `engine` names a preset.
    """

    running: Annotated[
        tuple[CountSettings, ...], Meta(description="requests that the server works on")
    ] = ()
    waiting: Annotated[
        tuple[CountSettings, ...],
        Meta(description="requests that wait for that; none: `running` counts them too"),
    ] = ()
    succeeded: Annotated[
        tuple[CountSettings, ...],
        Meta(description="requests since the server's start that are done: a counter"),
    ] = ()
    kv_cache: Annotated[
        tuple[CountSettings, ...],
        Meta(description="share of the KV cache in use, 0 to 1; the largest counts, for people"),
    ] = ()
    command: Annotated[
        Argv,
        Meta(
            description="instead of a page: prints a JSON object of running, waiting and succeeded;"
            " run without a shell, as the agent's user, at each report"
        ),
    ] = ()


class PageAccess(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """How the agent authenticates to a page, and which servers it trusts.

    It holds paths only, no key.
    """

    bearer_path: Annotated[
        str, Meta(description="file with a key, sent as `Authorization: Bearer`; mode 0600")
    ] = ""
    basic_path: Annotated[
        str, Meta(description="file with user:password, sent as `Authorization: Basic`; mode 0600")
    ] = ""
    tls_ca_path: Annotated[
        str, Meta(description="CA certificates to trust instead of the system's, for https")
    ] = ""


class InstanceSettings(Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One of several servers on a node; keys that it lacks are as in `server`."""

    health_url: Annotated[str, Meta(description="answers 200 when this server can serve")]
    metrics_url: Annotated[
        str, Meta(description="its page; none: `command` of its metrics is asked")
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
            description="answers 200 when the server can serve; required, unless there are"
            " `instances`"
        ),
    ] = ""
    metrics_url: Annotated[
        str,
        Meta(description="the server's own metrics page; required, unless a command is asked"),
    ] = ""
    engine: Annotated[
        str,
        Meta(
            description="vllm, sglang, triton, trtllm, dynamo, nim, llamacpp or tgi: whose names"
            " the page has; `metrics` stands in its place"
        ),
    ] = "vllm"
    metrics: Annotated[
        MetricsSettings | None, Meta(description="names of any other page, or a command")
    ] = None
    access: Annotated[
        PageAccess, Meta(description="keys and certificates for page and health check")
    ] = PageAccess()
    instances: Annotated[
        tuple[InstanceSettings, ...],
        Meta(
            description="several servers on this node, instead of `health_url` and `metrics_url`:"
            " their load is the sum, and all must be healthy"
        ),
    ] = ()
    units: Annotated[
        tuple[str, ...],
        Meta(
            description="systemd units, scopes or slices that the server runs in: a GPU process of"
            " no other is its own. None: those of whoever listens at a health_url's port"
        ),
    ] = ()
    start: Annotated[Argv, Meta(min_length=1, description="start the server")]
    stop: Annotated[Argv, Meta(min_length=1, description="stop it; returns when it is gone")]
    route: Annotated[Argv, Meta(min_length=1, description="send requests to this node again")]
    unroute: Annotated[Argv, Meta(min_length=1, description="send no new requests to this node")]
    hook_timeout_s: Annotated[
        PositiveFloat, Meta(description="a command that takes longer is ended and counts as failed")
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
        str, Meta(min_length=1, description="ledger and workers; must outlive a restart")
    ]
    nats_url: Annotated[
        str,
        Meta(description="nats://host:port or tls://host:port; this or `mqtt_url` must be there"),
    ] = ""
    mqtt_url: Annotated[
        str,
        Meta(
            description="mqtt://host:port or mqtts://host:port of nats-server's MQTT listener, for"
            " a site that allows nothing else; in place of `nats_url`"
        ),
    ] = ""
    insecure: Annotated[bool, Meta(description="allow a plain-text URL off loopback")] = False
    access: Annotated[NatsAccess, Meta(description="keys and certificates for the NATS server")] = (
        NatsAccess()
    )
    rack: Annotated[
        str, Meta(description="rack or switch of this node; `philly` and others place by it")
    ] = ""
    service: Annotated[
        Token | None, Meta(description="inference service of this node; none in training")
    ] = None
    server: Annotated[
        ServerSettings | None, Meta(description="the inference server; none in training")
    ] = None
    advertised_host: Annotated[
        str, Meta(min_length=1, description="name or address that gangs rendezvous at")
    ] = "127.0.0.1"
    report_period_s: Annotated[PositiveFloat, Meta(description="time between two reports")] = 1.0
    step_period_s: Annotated[
        PositiveFloat, Meta(description="time between two looks while something is in transition")
    ] = 0.25
    collect_deadline_s: Annotated[
        PositiveFloat, Meta(description="a collector that takes longer has failed this time")
    ] = 2.0
    unread_page_timeout_s: Annotated[
        PositiveFloat,
        Meta(
            description="a draining server whose metrics page cannot be read for so long is routed"
            " again: it may have requests still"
        ),
    ] = 60.0
    kernel_log: Annotated[
        KernelLogChoice,
        Meta(
            description="where XIDs are read beside NVML: journal, kmsg (/dev/kmsg), off; or auto,"
            " the first of these that this account can read"
        ),
    ] = KernelLogChoice.AUTO
    device_free_timeout_s: Annotated[
        PositiveFloat, Meta(description="a GPU busy this long after its last worker: quarantine")
    ] = 60.0
    unresponsive_gpu_wait_s: Annotated[
        NonNegativeFloat,
        Meta(
            description="a server that comes home waits so long for a GPU that does not answer, and"
            " then starts without its answer; keep it below the cell's `device_free_p99_s`"
        ),
    ] = 5.0
    device_free_memory_ratio: Annotated[
        Ratio, Meta(description="a GPU with less memory used than this counts as free")
    ] = 0.05
    stranger_after_s: Annotated[
        PositiveFloat,
        Meta(
            description="a GPU process of nobody's keeps a node from being lent once it was seen"
            " for so long, or several in a row on one GPU for five times as long; what is there for"
            " less, as a diagnostic is, is only waited for; at most 60"
        ),
    ] = 2.0
    warm_up_timeout_s: Annotated[
        PositiveFloat, Meta(description="a server not healthy by then: quarantine")
    ] = 900.0
    quarantine_s: Annotated[
        NonNegativeFloat, Meta(description="shortest stay in quarantine before the next try")
    ] = 60.0
    vacate_grace_s: Annotated[
        NonNegativeFloat, Meta(description="longest grace of a worker when the node must go home")
    ] = 60.0
    kept_logs_count: Annotated[
        NonNegativeInt,
        Meta(description="logs of this many ended workers are kept; the oldest go first"),
    ] = 1000
    kept_logs_bytes: Annotated[
        NonNegativeInt,
        Meta(description="and no more of them than this in all; a larger log is not kept"),
    ] = 1 << 30
    failure_rules: Annotated[
        str,
        Meta(
            description="TOML file of the site that says which words in a worker's log mean which"
            " failure; it goes before the packaged rules"
        ),
    ] = ""
    worker_starter: Annotated[Starter, Meta(description="systemd or detached")] = Starter.SYSTEMD
    job_user: Annotated[
        str,
        Meta(
            description="account that workers run as, for an agent that is root; none: its own user"
        ),
    ] = ""
    is_root_allowed: Annotated[
        bool, Meta(description="let workers run as root; for a demo on a machine of one person")
    ] = False
    last_resort: Annotated[
        Starter, Meta(description="who runs --go-home when the agent is dead: systemd or detached")
    ] = Starter.SYSTEMD
    hung_after_s: Annotated[
        PositiveFloat,
        Meta(
            description="an agent that keeps a lent node past its lease and gives no sign of life"
            " for so long, or for half of the lease's TTL, is ended by --go-home"
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
        for field, value in (("service", self.service), ("server", self.server)):
            if inference and value is None:
                raise ConfigError(f"{field}: an inference node needs it (home_pool is inference)")
            if not inference and value is not None:
                raise ConfigError(f"{field}: a training node has none (home_pool is training)")
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
