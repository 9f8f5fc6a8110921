"""What a job file may not say: every refusal names its field."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from common.errors import ConfigError
from common.jobspec import MAX_SPEC_BYTES, misfit, parse
from common.messages import DesiredState, OrderPhase, WorkerOrder, decode, encode
from common.model import (
    MAX_WORKERS,
    CheckpointSpec,
    GpuUuid,
    JobId,
    JobSpec,
    NodeRole,
    RendezvousSpec,
    RetrySpec,
    WorkerKey,
    WorkerRange,
)
from tests.tables import each_row

GOOD: dict[str, Any] = {"name": "j", "command": ["train"], "workers": {"min": 1, "max": 2}}

BAD: dict[str, tuple[dict[str, Any], str]] = {
    "no end": ({"expected_runtime_s": float("inf")}, "expected_runtime_s"),
    "no number": ({"expected_runtime_s": float("nan")}, "expected_runtime_s"),
    "endless deadline": ({"deadline_s": float("inf")}, "deadline_s"),
    "endless limit": ({"time_limit_s": float("inf")}, "time_limit_s"),
    "endless silence": ({"stop_after_s": float("inf")}, "stop_after_s"),
    "endless grace": ({"checkpoint": {"grace_s": float("inf")}}, "checkpoint.grace_s"),
    "grace that is no number": ({"checkpoint": {"grace_s": float("nan")}}, "checkpoint.grace_s"),
    "empty program": ({"command": [""]}, "command"),
    "blank program": ({"command": [" ", "x"]}, "command"),
    "NUL in the command": ({"command": ["train", "a\0b"]}, "command"),
    "blank store": ({"rendezvous": {"command": [" "]}}, "rendezvous.command"),
    "NUL in the store": ({"rendezvous": {"command": ["kv", "\0"]}}, "rendezvous.command"),
    "relative workdir": ({"workdir": "relative/dir"}, "workdir"),
    "empty workdir": ({"workdir": ""}, "workdir"),
    "NUL in the workdir": ({"workdir": "/a\0b"}, "workdir"),
    "env name with =": ({"env": {"A=B": "1"}}, "env"),
    "empty env name": ({"env": {"": "1"}}, "env"),
    "NUL in an env name": ({"env": {"A\0": "1"}}, "env"),
    "NUL in an env value": ({"env": {"A": "\0"}}, "env"),
    "NUL in the checkpoint": ({"checkpoint": {"path": "a\0"}}, "checkpoint.path"),
    "empty checkpoint": ({"checkpoint": {"path": ""}}, "checkpoint.path"),
    "no such signal": ({"checkpoint": {"signal": "SIGNONE"}}, "checkpoint.signal"),
    "name that is no text": ({"name": "\ud800"}, "name"),
    "argument that is no text": ({"command": ["train", "\udcff"]}, "command"),
    "choice that is no text": ({"launcher": "\ud800"}, "launcher"),
    "env name that is no text": ({"env": {"\udcff": "1"}}, "env"),
    "env value that is no text": ({"env": {"A": "\udcff"}}, "env"),
    "GPU type that is no text": ({"gpu": {"types": ["\ud800"]}}, "gpu.types"),
    "multiplier that is no text": (
        {"gpu": {"worker_multiplier": {"\ud800": 1}}},
        "gpu.worker_multiplier",
    ),
    "more types than any fleet has": (
        {"gpu": {"types": [f"t{n}" for n in range(65)]}},
        "gpu.types",
    ),
    "more multipliers than types": (
        {"gpu": {"worker_multiplier": {f"t{n}": 2 for n in range(65)}}},
        "gpu.worker_multiplier",
    ),
    "longer table than a pass goes through": (
        {"profile": {"speedup": [[n, 1.0] for n in range(1, 514)]}},
        "profile.speedup",
    ),
    "min above max": ({"workers": {"min": 3, "max": 2}}, "workers"),
    "workers without end": ({"workers": {"min": 1, "max": 100_000_000}}, "workers.max"),
    "too many GPUs": ({"gpus_per_worker": 10**9}, "gpus_per_worker"),
    "huge priority": ({"priority": 10**30}, "priority"),
    "huge memory": ({"memory_bytes_per_worker": 10**30}, "memory_bytes_per_worker"),
    "huge multiplier": ({"gpu": {"worker_multiplier": {"V100": 10**9}}}, "gpu.worker_multiplier"),
}


@each_row("why", BAD)
def test_a_job_that_no_node_could_run_is_refused_by_its_field(why: str) -> None:
    """What would fail, hang or overflow later is an error now, and says where it stands."""
    change, field = BAD[why]
    with pytest.raises(ConfigError, match=rf"^job\.toml: .*field {field}[\[.:]") as caught:
        parse({**GOOD, **change}, source="job.toml")
    str(caught.value).encode()
    assert "\0" not in str(caught.value)


def test_a_job_that_fits_passes_as_it_is() -> None:
    """Empty arguments, = in a value and the largest gang are all right."""
    spec = parse(
        {
            **GOOD,
            "command": ["train", "", "a=b"],
            "env": {"A": "b=c"},
            "workers": {"min": 1, "max": MAX_WORKERS},
            "stop_after_s": 60.0,
        },
        source="job.toml",
    )
    assert (spec.command, spec.env, spec.stop_after_s) == (
        ("train", "", "a=b"),
        {"A": "b=c"},
        60.0,
    )


@pytest.mark.parametrize(
    ("env", "field"),
    [({"A": "1", "B": 1}, "env.B"), ({"A": None}, "env.A"), ({7: "x"}, "env.7")],
)
def test_a_variable_that_is_no_text_is_named(env: dict[Any, Any], field: str) -> None:
    """A job may have dozens of them; the place is that of the one."""
    with pytest.raises(
        ConfigError, match=f"^line 9: field {field}: Expected `str` in quotes, got "
    ):
        parse({**GOOD, "env": env}, source="f", place_by_path={field: "line 9"})


def test_the_check_holds_for_a_job_that_came_decoded() -> None:
    """A caller that encodes a job itself passes the same rules as a job file."""
    spec = JobSpec(name="j", command=("",), workers=WorkerRange(min=1, max=1))
    decoded = msgspec.msgpack.decode(msgspec.msgpack.encode(spec), type=JobSpec)
    found = misfit(decoded)
    assert found is not None
    assert found.field == "command"


@each_row("field", ["command", "workdir", "env", "checkpoint", "rendezvous"])
def test_what_is_no_text_is_found_in_a_job_that_is_none_of_a_file(field: str) -> None:
    """A caller who makes a job in code hears of the field, before it fails to be encoded."""
    bad = "/\ud800"
    values: dict[str, Any] = {
        "command": ("train", bad),
        "workdir": bad,
        "env": {"A": bad},
        "checkpoint": CheckpointSpec(path=bad),
        "rendezvous": RendezvousSpec(command=(bad,)),
    }
    spec = JobSpec(name="j", command=("train",), workers=WorkerRange(min=1, max=1))
    found = misfit(msgspec.structs.replace(spec, **{field: values[field]}))
    assert found is not None
    assert found.field.startswith(field)
    assert found.what == "'/\\ud800' is not UTF-8"


def large(size_bytes: int) -> JobSpec:
    """A job that has so many bytes as it is sent, nearly all of them in its environment."""
    small = parse({**GOOD, "env": {"X": "x" * 1000}}, source="f")
    more = size_bytes - len(msgspec.msgpack.encode(small))
    return msgspec.structs.replace(small, env={"X": "x" * (1000 + more)})


def test_a_job_too_large_to_be_ordered_is_refused_by_its_largest_field() -> None:
    """A node's orders are one message: what does not fit would take the node out of the cell."""
    assert misfit(large(MAX_SPEC_BYTES)) is None
    found = misfit(large(MAX_SPEC_BYTES + 1))
    assert found is not None
    assert found.field == "env"
    assert str(MAX_SPEC_BYTES) in found.what
    with pytest.raises(ConfigError, match=r"field command: .*files that the job reads"):
        parse({**GOOD, "command": ["sh", "-c", "true;" * 10_000]}, source="f")


def test_a_full_node_can_be_told_of_the_largest_jobs() -> None:
    """Sixty workers of them, and the message is within its bound."""
    node = "n" * 20
    order = WorkerOrder(
        key=WorkerKey(job_id=JobId("j" * 40), attempt=1, worker_index=0),
        spec=large(MAX_SPEC_BYTES),
        tenant="team",
        user="ann",
        submitted_at_s=1e9,
        gpu_uuids=(GpuUuid("GPU-" + "0" * 36),),
        gpu_type="H100",
        is_flexible=False,
        phase=OrderPhase.RUN,
        worker_count=100,
    )
    state = DesiredState(
        node=node, epoch=1, generation=1, role=NodeRole.TRAINING, workers=(order,) * 60
    )
    assert decode(encode(state), DesiredState) == state


def test_a_stall_timeout_needs_a_budget_and_is_sent_only_where_it_is_set() -> None:
    """Without restarts it could start nothing again; an agent of an older version refuses what it
    does not know, so that a job without one is the job of before."""
    plain = JobSpec(name="j", command=("x",), workers=WorkerRange(min=1, max=1))
    assert b"stall_timeout_s" not in msgspec.msgpack.encode(plain)
    timed = msgspec.structs.replace(plain, stall_timeout_s=600.0)
    found = misfit(timed)
    assert found is not None
    assert found.field == "stall_timeout_s"
    assert "retry.max_restarts, which is 0" in found.what
    assert misfit(msgspec.structs.replace(timed, retry=RetrySpec(max_restarts=1))) is None
