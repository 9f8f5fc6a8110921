"""Every decoder of bytes from outside, the error that is its own, and inputs to begin with.

`tests/fuzz/test_decoders.py` draws changes of these inputs in the gate; `make fuzz` has a
coverage-guided fuzzer look for others.
"""

from __future__ import annotations

import atexit
import io
import shutil
import tempfile
from collections.abc import Callable, Iterator
from functools import cache, partial
from pathlib import Path

import msgspec
from msgspec import Struct

from agent.core.state import Memory
from agent.gpu import kernel_log
from agent.gpu import wire as gpu_wire
from agent.gpu.fake import fleet as fake_fleet
from agent.settings import AgentSettings
from agent.shim.files import STATUS_FILE, read_json
from agent.storage import ledger
from agent.telemetry.engine_page_parser import parse_metrics
from agent.telemetry.engine_series import ENGINES
from agent.workers import record as workers_record
from common import api, encoding, failure_rules, jobspec, messages, settings
from common.errors import ConfigError, ProtocolError
from common.monitoring import page as metrics_page
from coordinator.cli import job_file
from coordinator.client import registry
from coordinator.engine import record
from coordinator.engine.engine import decode_state
from coordinator.engine.state.tables import ClusterState
from coordinator.policies.parts.memory import recalled
from coordinator.service.leadership import lease as leadership_lease
from coordinator.service.nodes import report_validation
from coordinator.service.settings import CoordinatorSettings
from coordinator.workloads.formats import parse_jobs, read_curves, read_nodes, read_throughputs
from coordinator.workloads.load_formats import parse_loads
from coordinator.workloads.table import read_text
from tests.fuzz.examples import encoded, example

DATA = Path(__file__).parents[1] / "data"


class Decoder(Struct, frozen=True, kw_only=True):
    """One decoder.

    decode: any bytes; what it returns is not looked at.
    own: what it may raise.
    seeds: inputs that it takes.
    """

    name: str
    decode: Callable[[bytes], object]
    own: tuple[type[Exception], ...]
    seeds: tuple[bytes, ...]


@cache
def _scratch() -> Path:
    """For decoders that read a file by its path."""
    directory = Path(tempfile.mkdtemp(prefix="aryl-fuzz-"))
    atexit.register(shutil.rmtree, directory, ignore_errors=True)
    return directory


def _from_file(name: str, read: Callable[[Path], object]) -> Callable[[bytes], object]:
    def decode(data: bytes) -> object:
        path = _scratch() / name
        path.write_bytes(data)
        return read(path)

    return decode


def _from_text(name: str, parse: Callable[[str], object]) -> Callable[[bytes], object]:
    """Through the reader that turns bytes into text, as the product does."""
    return _from_file(name, lambda path: parse(read_text(path)))


def _packed(*kinds: type) -> tuple[bytes, ...]:
    return tuple(encoded(kind, is_full=is_full) for kind in kinds for is_full in (False, True))


def _files(pattern: str) -> tuple[bytes, ...]:
    return tuple(path.read_bytes() for path in sorted(DATA.glob(pattern)))


def _begin(pattern: str) -> bytes:
    """The first lines of the one file; a fuzzer is quick with small inputs."""
    (data,) = _files(pattern)
    return b"".join(data.splitlines(keepends=True)[:4])


def _message(kind: type[encoding.Message], data: bytes) -> object:
    return encoding.decode(data, kind)


def _page(engine: str, data: bytes) -> object:
    return parse_metrics(data.decode(errors="replace"), engine)


def _load(kind: type[Struct], path: Path) -> object:
    return settings.load(path, kind)


def _messages() -> Iterator[Decoder]:
    kinds: set[type[encoding.Message]] = {
        kind
        for module in (api, messages)
        for kind in vars(module).values()
        if isinstance(kind, type) and issubclass(kind, encoding.Message)
    }
    for kind in sorted(kinds - {encoding.Message}, key=lambda kind: kind.__name__):
        yield Decoder(
            name=f"message {kind.__name__}",
            decode=partial(_message, kind),
            own=(ProtocolError,),
            seeds=_packed(kind),
        )


_FLEET = b"""
[[gpu]]
model = "H100"
memory_bytes = 1000
count = 2
[[fault]]
kind = "hang"
gpu = 1
at_s = 5.0
"""


def _toml(kind: type) -> bytes:
    """Its example as a settings file: a line a field, tables in braces."""
    fields = {key: value for key, value in example(kind, is_full=True).items() if value is not None}
    return "".join(f"{key} = {_inline(value)}\n" for key, value in fields.items()).encode()


def _inline(value: object) -> str:
    if isinstance(value, dict):
        items = ", ".join(f"{k} = {_inline(v)}" for k, v in value.items() if v is not None)
        return f"{{{items}}}"
    if isinstance(value, list):
        return f"[{', '.join(map(_inline, value))}]"
    return msgspec.json.encode(value).decode()


def _metrics() -> Iterator[Decoder]:
    for engine in ENGINES:
        yield Decoder(
            name=f"metrics page {engine}",
            decode=partial(_page, engine),
            own=(ProtocolError,),
            seeds=_files(f"metrics/{engine}*.txt"),
        )


def _job_files() -> Iterator[Decoder]:
    spec = b'name = "a"\ncommand = ["true", "x"]\n[workers]\nmin = 1\nmax = 2\n[env]\nA = "b"\n'
    flow = b'{"name": "a", "command": ["true"], "workers": {"min": 1, "max": 2}}'
    seeds = {
        job_file.FileKind.TOML: spec,
        job_file.FileKind.YAML: b"name: a\ncommand: [x]\nworkers:\n  min: 1\n  max: 2\n",
        job_file.FileKind.JSON: flow,
    }
    for kind, seed in seeds.items():

        def decode(data: bytes, kind: job_file.FileKind = kind) -> object:
            found = job_file.read(job_file.STDIN, kind=kind, stdin=io.BytesIO(data))
            return jobspec.parse(found.values, source=found.source)

        yield Decoder(name=f"job file {kind}", decode=decode, own=(ConfigError,), seeds=(seed,))


def _ledger(data: bytes) -> object:
    payload, _ = ledger.last_record(data)
    return ledger.peek_payload(payload or data)


def _status(path: Path) -> object:
    return workers_record.read_record(path.parent)


def _traces() -> Iterator[Decoder]:
    own = (ConfigError,)
    jobs = ("chronus", "elasticflow", "helios", "openb_pods", "philly", "tiresias")
    loads = ("azure_llm", "mooncake", "servegen_aggregate", "servegen_clients")
    yield Decoder(
        name="trace of jobs",
        decode=_from_text("jobs", lambda text: parse_jobs("jobs", text)),
        own=own,
        seeds=tuple(_begin(f"traces/{name}.*") for name in jobs),
    )
    yield Decoder(
        name="trace of load",
        decode=_from_text("load", lambda text: parse_loads("load", text, bin_s=1.0)),
        own=own,
        seeds=tuple(_files(f"traces/{name}.*")[0] for name in loads),
    )
    yield Decoder(
        name="list of nodes",
        decode=_from_file("nodes", lambda path: read_nodes(path, skip_zero_gpus=True)),
        own=own,
        seeds=(_begin("traces/openb_nodes.csv"),),
    )
    yield Decoder(
        name="scaling curves",
        decode=_from_file("curves", lambda path: read_curves(path, gpu_type="T4")),
        own=own,
        seeds=_files("traces/yolov3.csv"),
    )
    yield Decoder(
        name="throughputs",
        decode=_from_file("throughputs", read_throughputs),
        own=own,
        seeds=(b'{"v100": {"(\'a\', 1)": {"null": 1.5}}}',),
    )


def _settings() -> Iterator[Decoder]:
    for kind in (AgentSettings, CoordinatorSettings):
        yield Decoder(
            name=f"settings {kind.__name__}",
            decode=_from_file("settings.toml", partial(_load, kind)),
            own=(ConfigError,),
            seeds=(_toml(kind),),
        )


def all_decoders() -> dict[str, Decoder]:
    """Every decoder by its name."""
    report = encoded(messages.NodeReport, is_full=True)
    found = [
        *_messages(),
        Decoder(
            name="node report",
            decode=lambda data: report_validation.node_report(data, "aryl.v1.c.node.a-1.report"),
            own=(ProtocolError,),
            seeds=(report,),
        ),
        Decoder(
            name="leader key",
            decode=leadership_lease.decode_value,
            own=(),
            seeds=_packed(leadership_lease.LeaseValue),
        ),
        Decoder(
            name="journal record",
            decode=lambda data: record.decode_record(data, sequence=1),
            own=(ProtocolError,),
            seeds=(*_packed(record.Record), *_files("wire/record*.msgpack")),
        ),
        Decoder(
            name="snapshot",
            decode=decode_state,
            own=(ProtocolError,),
            seeds=_packed(ClusterState),
        ),
        Decoder(
            name="policy memory",
            decode=lambda data: recalled(data, dict[str, float]),
            own=(),
            seeds=_packed(dict[str, float]),
        ),
        Decoder(name="ledger", decode=_ledger, own=(), seeds=_packed(Memory)),
        Decoder(
            name="worker status",
            decode=_from_file(STATUS_FILE, _status),
            own=(msgspec.DecodeError,),
            seeds=(msgspec.json.encode(example(workers_record.WorkerRecord, is_full=True)),),
        ),
        Decoder(
            name="file of a shim",
            decode=_from_file("shim.json", lambda path: read_json(str(path))),
            own=(),
            seeds=(b'{"a": [1, 2.5, null, "b"]}',),
        ),
        Decoder(
            name="GPU sample",
            decode=gpu_wire.sample_of,
            own=(ProtocolError,),
            seeds=_packed(gpu_wire.Sample),
        ),
        Decoder(
            name="kernel message",
            decode=kernel_log.kmsg_record,
            own=(ProtocolError,),
            seeds=(b"4,1234,5678,-;NVRM: Xid (PCI:0000:01:00): 79, pid=1\n SUBSYSTEM=pci\n",),
        ),
        Decoder(
            name="fake fleet",
            decode=_from_file("fleet.toml", fake_fleet.load_fleet),
            own=(ConfigError,),
            seeds=(_FLEET,),
        ),
        Decoder(
            name="failure rules",
            decode=_from_file("rules.toml", lambda path: failure_rules.read_file(str(path))),
            own=(ConfigError,),
            seeds=(_toml(failure_rules.RuleFile),),
        ),
        Decoder(
            name="registry of cells",
            decode=_from_file("cell.json", registry.read_file),
            own=(ConfigError,),
            seeds=(msgspec.json.encode(example(registry.CellInfo, is_full=True)),),
        ),
        Decoder(
            name="request for the metrics page",
            decode=metrics_page.parse,
            own=(metrics_page.Refusal,),
            seeds=(b"GET /metrics?a=b HTTP/1.1\r\nHost: a:1\r\nAccept: text/plain\r\n\r\n",),
        ),
        *_metrics(),
        *_job_files(),
        *_traces(),
        *_settings(),
    ]
    return {each.name: each for each in found}
