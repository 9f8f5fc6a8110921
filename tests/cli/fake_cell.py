"""A cell that answers from a table, and the CLI pointed at it. Must not know what is asserted.

Requests and answers go through the real encoder, decoder, subjects and client: what the fake
cannot decode, a coordinator could not either.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Mapping
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from typing import Any

from msgspec import UNSET, structs
from typer.testing import CliRunner

from common.api import (
    REQUESTS,
    ApiError,
    ApiErrorCode,
    JobRow,
    LoanRow,
    NodeRow,
    Order,
    ServiceRow,
    Status,
    StoryRow,
    TenantRow,
)
from common.bus import Handler, Subscription
from common.errors import Unavailable
from common.messages import Message, decode, encode
from common.model import JobState, Mode, NodeRole, Pool
from common.subjects import api_caller
from coordinator.cli.app import app
from coordinator.cli.session import Surroundings
from coordinator.client.target import Target

NOW_S = 1_700_000_000.0
"""2023-11-14T22:13:20Z."""

ENVIRON = {
    "ARYL_NATS_URL": "nats://127.0.0.1:4222",
    "ARYL_CELL": "lab",
    "ARYL_TENANT": "ops",
    "ARYL_USER": "ada",
    "COLUMNS": "200",
    "XDG_CONFIG_HOME": "/nonexistent",
    "ARYL_HOME": "/nonexistent/aryl",
}

Answer = Message | Exception | Callable[[Any], Message]


class QuickClock:
    """Time that passes only while somebody sleeps; nobody waits for it."""

    def __init__(self) -> None:
        self.slept_s = 0.0

    def now_s(self) -> float:
        """Seconds slept so far."""
        return self.slept_s

    def boot_id(self) -> str:
        """Always the same."""
        return "boot"

    def wall_s(self) -> float:
        """`NOW_S` and what was slept."""
        return NOW_S + self.slept_s

    async def sleep(self, delay_s: float) -> None:
        """Let others run once."""
        self.slept_s += delay_s
        await asyncio.sleep(0)

    def timeout(self, delay_s: float | None) -> AbstractAsyncContextManager[object]:
        """Real: no test here lets it expire."""
        return asyncio.timeout(delay_s)


class FakeCell:
    """A bus with a coordinator behind it.

    answers: by the request's type; a list gives one answer after the other, the last for ever. An
        exception is raised as the bus would; a type without an answer is refused.
    """

    def __init__(self, answers: Mapping[type[Message], Answer | list[Answer]]) -> None:
        self.answers = dict(answers)
        self.asked: list[Message] = []
        self.callers: set[tuple[str, str]] = set()
        self.cells: set[str] = set()
        self.targets: list[Target] = []
        self.is_closed = False

    @property
    def is_connected(self) -> bool:
        """Always."""
        return not self.is_closed

    async def publish(self, subject: str, data: bytes) -> None:
        """The CLI never does."""
        raise AssertionError(f"published to {subject}")

    async def subscribe(self, subject: str, handler: Handler) -> Subscription:
        """The CLI never does."""
        raise AssertionError(f"subscribed to {subject}")

    async def request(self, subject: str, data: bytes, *, timeout_s: float) -> bytes:
        """Decode, note, answer."""
        tenant, user, verb = api_caller(subject)
        [kind] = [kind for kind in REQUESTS if kind.__struct_config__.tag == verb]
        request = decode(data, kind)
        self.asked.append(_without_client(request))
        self.callers.add((tenant, user))
        self.cells.add(subject.split(".")[2])
        answer = self.answers.get(kind, ApiError(code=ApiErrorCode.USAGE, message=f"no {verb}"))
        if isinstance(answer, list):
            answer = answer.pop(0) if len(answer) > 1 else answer[0]
        if isinstance(answer, Exception):
            raise answer
        return encode(answer if isinstance(answer, Message) else answer(request))

    async def close(self) -> None:
        """Nothing to flush."""
        self.is_closed = True

    @asynccontextmanager
    async def connect(self, target: Target) -> AsyncGenerator[FakeCell, None]:
        """What `over_nats` is to a real cell."""
        self.targets.append(target)
        yield self
        await self.close()


def _without_client(request: Message) -> Message:
    """A request as a test expects it; the client names itself in each order."""
    if not isinstance(request, Order):
        return request
    assert request.client, "an order says where it comes from"
    return structs.replace(request, client=UNSET)


class Run:
    """One finished command."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code = code
        self.out = out
        self.err = err

    @property
    def json(self) -> Any:
        """Standard output as one JSON document."""
        return json.loads(self.out)


def aryl(
    cell: FakeCell,
    *args: str,
    environ: Mapping[str, str] | None = None,
    is_interactive: bool = False,
    types: str = "",
) -> Run:
    """Run the command line `aryl ARGS`; an exception that is no exit code rises."""
    around = Surroundings(
        environ={**ENVIRON, **(environ or {})},
        connect=cell.connect,
        clock=QuickClock(),
        is_interactive=lambda: is_interactive,
    )
    result = CliRunner().invoke(app, list(args), obj=around, input=types, prog_name="aryl")
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return Run(result.exit_code, result.stdout, result.stderr)


def refusal(code: ApiErrorCode, message: str = "no", field: str = "") -> ApiError:
    """What a coordinator says when it does not do it."""
    return ApiError(code=code, message=message, field=field)


def no_answer() -> Unavailable:
    """What the bus raises when somebody was asked and did not answer in time."""
    error = Unavailable("no answer in 10 s")
    error.__cause__ = TimeoutError()
    return error


def nobody() -> Unavailable:
    """What the bus raises when nobody listens."""
    return Unavailable("no responders")


def job_row(job_id: str = "jabc", **changes: Any) -> JobRow:
    """A job that runs on two nodes."""
    values: dict[str, Any] = {
        "job_id": job_id,
        "name": "train",
        "tenant": "lab",
        "user": "ada",
        "state": JobState.RUNNING,
        "attempt": 1,
        "worker_count": 2,
        "min_workers": 2,
        "max_workers": 4,
        "gpus_per_worker": 8,
        "gpus": 16,
        "nodes": ("i0", "t0"),
        "submitted_at_s": NOW_S - 200.0,
        "started_at_s": NOW_S - 180.0,
        "finished_at_s": None,
        "queueing_s": 20.0,
        "preemption_count": 0,
    }
    return JobRow(**{**values, **changes})


def node_row(node: str = "t0", **changes: Any) -> NodeRow:
    """A training node that is full."""
    values: dict[str, Any] = {
        "node": node,
        "home_pool": Pool.TRAINING,
        "role": NodeRole.TRAINING,
        "desired_role": NodeRole.TRAINING,
        "service": "",
        "gpu_type": "H100",
        "gpus": 8,
        "gpus_held": 8,
        "gpu_busy_ratio": 0.93,
        "jobs": ("jabc",),
        "is_cordoned": False,
        "is_heard": True,
        "heard_ago_s": 0.4,
        "rack": "r1",
        "detail": "",
    }
    return NodeRow(**{**values, **changes})


def tenant_row(**changes: Any) -> TenantRow:
    """A tenant that borrows four GPUs."""
    values: dict[str, Any] = {
        "tenant": "vision",
        "parent": "research",
        "weight": 2.0,
        "guarantee_gpus": 8,
        "used_gpus": 12,
        "borrowed_gpus": 4,
        "borrow_limit_gpus": None,
        "lend_limit_gpus": 2,
        "waiting_gpus": 16,
        "fair_share_gpus": 10.5,
    }
    return TenantRow(**{**values, **changes})


def service_row(**changes: Any) -> ServiceRow:
    """A service that lends one of its four nodes."""
    values: dict[str, Any] = {
        "service": "chat",
        "mode": Mode.ACT,
        "is_recalled": False,
        "nodes": 4,
        "serving": 3,
        "on_loan": 1,
        "coming_home": 0,
        "load_per_s": 12.5,
        "capacity_per_node": 10.0,
        "min_serving": 1,
        "reclaim_deadline_s": 120.0,
        "return_s": 75.0,
    }
    return ServiceRow(**{**values, **changes})


def loan_row(lease_id: str = "l7", **changes: Any) -> LoanRow:
    """A node that is lent since two minutes."""
    values: dict[str, Any] = {
        "lease_id": lease_id,
        "node": "i0",
        "service": "chat",
        "state": "on loan",
        "decided_at_s": NOW_S - 120.0,
        "begun_at_s": NOW_S - 110.0,
        "reclaim_ordered_at_s": None,
        "returned_at_s": None,
        "reclaim_deadline_s": 120.0,
        "reclaim_s": None,
        "lapse_s": None,
        "is_late": False,
        "reason": "2 nodes spare",
        "reclaim_reason": "",
        "predicted_preemptions": 0,
        "realised_preemptions": 0,
        "predicted_cost_gpu_s": 0.0,
        "realised_cost_gpu_s": 0.0,
    }
    return LoanRow(**{**values, **changes})


def story_row(number: int = 1, **changes: Any) -> StoryRow:
    """A job that was started."""
    values: dict[str, Any] = {
        "number": number,
        "at_s": NOW_S - 180.0,
        "subject": "jabc",
        "what": "started on i0, t0",
        "reason": "head of the line",
    }
    return StoryRow(**{**values, **changes})


def status(**changes: Any) -> Status:
    """A small cell that works."""
    values: dict[str, Any] = {
        "cell": "lab",
        "epoch": 3,
        "policy": "aryl",
        "is_frozen": False,
        "nodes": 2,
        "nodes_heard": 2,
        "training_gpus": 8,
        "training_gpus_held": 8,
        "on_loan_nodes": 1,
        "on_loan_gpus": 8,
        "on_loan_gpus_held": 8,
        "coming_home_nodes": 0,
        "inference_nodes": 1,
        "serving_nodes": 0,
        "pending_jobs": 1,
        "running_jobs": 1,
        "gpu_busy_ratio_training": 0.93,
        "gpu_busy_ratio_inference": None,
        "figures": {
            "loans": 1,
            "queueing_s": {"mean": 20.0, "p50": 20.0, "p95": 20.0},
            "jct_s": {"mean": None, "p50": None, "p95": None},
        },
        "bad_messages": 0,
        "up_s": 7_500.0,
    }
    return Status(**{**values, **changes})
