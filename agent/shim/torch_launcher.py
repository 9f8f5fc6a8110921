"""torchrun for an elastic gang.

It holds a rendezvous when a member leaves or joins, and ends when a rank fails.

    python3 torch_launcher.py TORCHRUN_OPTION... SCRIPT ARGUMENT...

The job's own Python runs it, as with `torch_store.py`. It therefore uses only torch and the
standard library, of any Python that PyTorch 2.4 supports. It takes torchrun's own command line, and
differs from torchrun in its response to the end of ranks:

- **A rank that fails because a member left, died or joined is no failure.** The ranks of a gang
  fail together when one of them goes: the next collective loses a peer. torchrun counts that
  against `--max-restarts`, and cannot tell it from a crash except by that count. Here the members
  report to each other, through the store of the round, which of them leave and which failed. A
  failure that no change explains ends the launcher, with the exit code of the rank.
- **A member that leaves announces it.** torchrun's members notice a leaver by its missing
  heartbeats, 15 s later. A launcher whose ranks have finished first waits up to 300 s for the
  others' and then closes the rendezvous for all. Here it takes itself off the list of members at
  once.
- **Ranks that hang are restarted** when a member is gone: in NCCL they would wait for the
  collective's own timeout, ten minutes.
- **Ranks have the job's grace** to save, even where they stop only for a new rendezvous. torchrun
  kills them after 30 s, and has an option for it since 2.12.

`NEEDED` names the parts of torchrun that are not public. The launcher looks them up before anything
runs; they are the same from 2.4 to 2.14.
"""

from __future__ import annotations

import importlib
import json
import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:
    from collections.abc import Callable

EX_NO_TORCH = 127
EX_CONFIG = 78
"""PyTorch is too old, or too new, for this launcher: no other try would help."""
EX_TEMPFAIL = 75
"""The rendezvous is lost: no code of the job failed."""
OLDEST = (2, 4)
NEEDED = (
    ("torch.distributed.run", ("get_args_parser", "parse_args", "run")),
    ("torch.distributed.launcher.api", ("LocalElasticAgent",)),
    ("torch.distributed.elastic.rendezvous", ("RendezvousError", "RendezvousConnectionError")),
    ("torch.distributed.elastic.multiprocessing.api", ("PContext", "SignalException")),
    ("torch.distributed.elastic.multiprocessing.errors", ("ChildFailedError", "record")),
    (
        "torch.distributed.elastic.agent.server.api",
        (
            "SimpleElasticAgent._exit_barrier",
            "SimpleElasticAgent._invoke_run",
            "SimpleElasticAgent._monitor_workers",
        ),
    ),
    (
        "torch.distributed.elastic.rendezvous.dynamic_rendezvous",
        (
            "_RendezvousExitOp",
            "DynamicRendezvousHandler._get_deadline",
            "DynamicRendezvousHandler._stop_heartbeats",
        ),
    ),
)

POLL_S = 0.1
LOOK_S = 0.5
CHANGE_S = 5.0
"""Within this time a change of membership that explains a failure is known. The leaver's last rank
may take as long to end after its first one, whose connections the others lost."""
DEATH_S = 15.1
"""Within this time a member whose machine died has lost its place: torchrun's 3 heartbeats of 5 s,
which cannot be set before 2.7."""
BEHIND_S = 30.0
"""How long a member that failed after another waits for a stop, so that the first one's report
comes first."""
ARRIVAL_S = 10.0
"""How long launchers that start together wait for each other before the rendezvous: a late one
costs all others a restart."""
EXIT_BARRIER_S = 300.0
"""torchrun's own."""
DEPARTURE_S = 5.0


def say(text: str) -> None:
    """Write a line of this launcher's own into the worker's log."""
    sys.stderr.write(f"aryl-launcher: {text}\n")
    sys.stderr.flush()


class Order:
    """The order to stop this worker, read from a file that its shim writes beside its log."""

    def __init__(self, directory: str) -> None:
        self._status = Path(directory or os.devnull) / "status.json"
        self._looked_at_s = -LOOK_S

    def is_to_stop(self, *, looks_now: bool = False) -> bool:
        """Check the disk; an unreadable file means no order.

        looks_now: however short ago the last look was; else at most twice a second.
        """
        now_s = time.monotonic()
        if not looks_now and now_s - self._looked_at_s < LOOK_S:
            return False
        self._looked_at_s = now_s
        try:
            return json.loads(self._status.read_bytes())["stop_reason"] is not None
        except (OSError, ValueError, KeyError, TypeError):
            return False


class Meeting:
    """A rendezvous handler of torchrun whose members learn of each other's ends.

    In the store of each round, under `aryl/`, the members count four kinds of member: `leaving`, on
    request; `failed`, with failed ranks; `finished`; and `ended`, gone without a request. All else
    is left to the wrapped handler.
    """

    def __init__(self, inner: Any, order: Order, *, worker_index: str, starting: int) -> None:
        self._inner = inner
        self._order = order
        self._worker_index = worker_index
        self._starting = starting
        self.is_elastic = inner.settings.min_nodes != inner.settings.max_nodes
        self._members: frozenset[Any] = frozenset()
        self._round_store: Any = None
        self._is_leaving = False
        self._has_departed = False
        self._is_over = False

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)

    def next_rendezvous(self) -> Any:
        """As the handler's; the first call waits for the members that start together."""
        if self._starting and self.is_elastic:
            self._await_arrivals()
        self._starting = 0
        info = self._inner.next_rendezvous()
        self._round_store = info.store
        self._members = frozenset(self._state().participants)
        if self._is_leaving:
            self._count("leaving", 1)
        return info

    def num_nodes_waiting(self) -> int:
        """The number of members that wait to join or have gone.

        Above 0, torchrun runs a new rendezvous.

        A leaving member joins no new rendezvous: its ranks save, and the others go on without them.
        """
        waiting = int(self._inner.num_nodes_waiting())
        if self.is_leaving():
            return 0
        return waiting + (self._gone() if self.is_elastic else 0)

    def shutdown(self) -> bool:
        """Leave; only a gang that has finished closes its rendezvous, as others may go on."""
        if self._is_over:
            return bool(self._inner.shutdown())
        self._depart()
        return True

    def is_leaving(self, *, is_told: bool = False, looks_now: bool = False) -> bool:
        """True if this worker has an order to stop; the others then know why their ranks fail.

        looks_now: ranks here have ended, maybe less than a look after the order for that.
        """
        if not self._is_leaving and (is_told or self._order.is_to_stop(looks_now=looks_now)):
            self._is_leaving = True
            if self._round_store is not None:
                self._count("leaving", 1)
        return self._is_leaving

    def wait_for_others(self) -> None:
        """Wait, after the ranks here have finished, for all others' or the time to go on."""
        self._count("finished", 1)
        deadline_s = time.monotonic() + EXIT_BARRIER_S
        while time.monotonic() < deadline_s and not self.is_leaving(looks_now=True):
            if self._count("finished") >= len(self._members):
                self._is_over = True
                return
            if self._count("failed") or self.num_nodes_waiting():
                return
            time.sleep(POLL_S)

    def explanation(self, for_s: float) -> str:
        """Ranks here failed: the change that explains it, as text; empty when there is none.

        It waits as long as a change may still show: the fixed time, then until the others were
        heard of since, and until a silent member has lost its place.
        """
        others = self._members - {self._inner._this_node}
        if not others:
            return ""
        began_s = time.monotonic()
        heard = self._heartbeats(others)
        while not self.is_leaving():
            change = self._change()
            now = self._heartbeats(others)
            is_silent = self.is_elastic and any(now[one] == heard[one] for one in others)
            took_s = time.monotonic() - began_s
            if change or took_s > max(for_s, DEATH_S if is_silent else 0.0):
                return change
            time.sleep(POLL_S)
        return ""

    def failed_before(self) -> str:
        """Record that ranks failed here; the first worker that did so, or "" for this one."""
        if self._count("failed", 1) == 1:
            self._round_store.set("aryl/first", self._worker_index)
            return ""
        return str(self._round_store.get("aryl/first").decode())

    def _change(self) -> str:
        """The change since the rendezvous, as text; a gang of one size never changes."""
        if not self.is_elastic:
            return ""
        if self._inner.num_nodes_waiting():
            return "a worker joins"
        return "a worker left" if self._gone() or self._count("leaving") else ""

    def _await_arrivals(self) -> None:
        store, key = self._inner._store, f"aryl/{self._inner.get_run_id()}/arrived"
        arrived = store.add(key, 1)
        deadline_s = time.monotonic() + ARRIVAL_S
        while arrived < self._starting and time.monotonic() < deadline_s:
            time.sleep(POLL_S)
            arrived = store.add(key, 0)

    def _state(self) -> Any:
        return self._inner._state_holder.state

    def _heartbeats(self, others: frozenset[Any]) -> dict[Any, object]:
        beats = self._state().last_heartbeats
        return {one: beats.get(one) for one in others}

    def _gone(self) -> int:
        """Members that are no longer on the list, except those that ended by themselves.

        The list is as of the last look at the store. A worker that is missing itself while all
        others are missing too was frozen for a while: then all look dead to each other, and nothing
        has changed.
        """
        on_list = self._state().participants
        lost = self._members - frozenset(on_list)
        if not lost or not on_list:
            return 0
        return max(0, len(lost) - self._count("ended"))

    def _count(self, name: str, more: int = 0) -> int:
        try:
            return int(self._round_store.add(f"aryl/{name}", more))
        except RuntimeError as error:
            rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
            raise rendezvous.RendezvousConnectionError(str(error)) from error

    def _depart(self) -> None:
        """Leave the list of members at once; if that fails, the end of the heartbeats does it."""
        if self._has_departed:
            return
        self._has_departed = True
        rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
        dynamic = importlib.import_module("torch.distributed.elastic.rendezvous.dynamic_rendezvous")
        inner = self._inner
        inner._stop_heartbeats()
        try:
            if self._round_store is not None and not self.is_leaving(looks_now=True):
                self._count("ended", 1)
            deadline = inner._get_deadline(timedelta(seconds=DEPARTURE_S))
            inner._op_executor.run(dynamic._RendezvousExitOp(), deadline)
        except rendezvous.RendezvousError as error:
            say(f"could not leave the rendezvous: {error}")


def describe(rank: int, exit_code: int) -> str:
    """How a rank ended, as text; a negative exit code is a signal's, as in `subprocess`."""
    if exit_code < 0:
        return f"rank {rank} was ended by signal {-exit_code}"
    return f"rank {rank} exited with {exit_code}"


def elastic_agent(base: Any, signal_exception: type[BaseException]) -> type:
    """torchrun's agent, with the meeting deciding the meaning of a rank's end."""

    def init(self: Any, spec: Any, *arguments: Any, **options: Any) -> None:
        spec.rdzv_handler = self.meeting = Meeting(
            spec.rdzv_handler,
            Order(os.environ.get("ARYL_WORKER_DIRECTORY", "")),
            worker_index=os.environ.get("ARYL_WORKER_INDEX", "?"),
            starting=int(os.environ.get("ARYL_WORKER_COUNT", "0")),
        )
        base.__init__(self, spec, *arguments, **options)

    def monitor(self: Any, group: Any) -> Any:
        result = base._monitor_workers(self, group)
        if result.state.name in ("FAILED", "UNHEALTHY"):
            rank, code = first_failure(result.failures)
            if not goes_on(self.meeting, describe(rank, code)):
                self._remaining_restarts = 0
        return result

    def invoke_run(self: Any, *arguments: Any) -> Any:
        try:
            return base._invoke_run(self, *arguments)
        except signal_exception:
            self.meeting.is_leaving(is_told=True)
            raise

    def exit_barrier(self: Any) -> None:
        self.meeting.wait_for_others()

    def run(self: Any, *arguments: Any) -> Any:
        try:
            return base.run(self, *arguments)
        except signal_exception:
            # torchrun leaves its place to the missing heartbeats in that case.
            self.meeting.shutdown()
            raise

    methods: dict[str, Callable[..., Any]] = {
        "__init__": init,
        "_monitor_workers": monitor,
        "_invoke_run": invoke_run,
        "_exit_barrier": exit_barrier,
        "run": run,
    }
    return type("ElasticAgent", (base,), methods)


def first_failure(failures: dict[int, Any]) -> tuple[int, int]:
    """Rank and exit code of the rank that failed first; -1 and 1 where torchrun names none."""
    if not failures:
        return -1, 1
    rank, failure = min(failures.items(), key=lambda item: (item[1].timestamp, item[0]))
    return rank, int(failure.exitcode)


def goes_on(meeting: Meeting, what: str) -> bool:
    """True if a change of membership explains a failure, so that the gang meets again.

    Otherwise a worker that was not the first to fail waits for a stop, and exits only when none
    comes.
    """
    if meeting.is_leaving(looks_now=True):
        say(f"{what} while this worker was leaving")
        return False
    before = meeting.failed_before()
    change = meeting.explanation(BEHIND_S if before else CHANGE_S if meeting.is_elastic else 0.0)
    if change:
        say(f"{what}; {change}: meeting again")
    elif before:
        say(f"{what} after worker {before} had failed")
    else:
        say(f"{what} and no worker left or joined: the job failed")
    return bool(change)


def give_grace(context: Any, grace_s: int) -> None:
    """Give ranks that are asked to end the job's grace, on every occasion.

    Ranks that are ended because another rank of their worker failed keep torchrun's 30 s: they have
    no peers to save with. Only they are ended without the name of a signal.
    """
    close = context.close

    def close_in_grace(self: Any, death_sig: Any = None, timeout: int = 30) -> None:
        close(self, death_sig, grace_s if death_sig else timeout)

    context.close = close_in_grace


def lacking() -> str:
    """The parts of PyTorch that the launcher needs and this version lacks, as text; empty: none."""
    version = importlib.import_module("torch").__version__
    if tuple(int(part) for part in version.split(".")[:2]) < OLDEST:
        return f"PyTorch {version} is older than {OLDEST[0]}.{OLDEST[1]}"
    for module, names in NEEDED:
        for name in names:
            found: Any = importlib.import_module(module)
            for part in name.split("."):
                found = getattr(found, part, None)
            if found is None:
                return f"PyTorch {version} has no {module}.{name}"
    return ""


def launch(arguments: list[str]) -> int:
    """Be torchrun until it ends; the exit status of this process."""
    grace_s = int(float(os.environ.get("ARYL_GRACE_SECONDS", "30")))
    run = importlib.import_module("torch.distributed.run")
    launcher: Any = importlib.import_module("torch.distributed.launcher.api")
    processes = importlib.import_module("torch.distributed.elastic.multiprocessing.api")
    errors = importlib.import_module("torch.distributed.elastic.multiprocessing.errors")
    rendezvous = importlib.import_module("torch.distributed.elastic.rendezvous")
    options = run.get_args_parser().format_help()
    if "--shutdown-timeout" in options:
        arguments = [f"--shutdown-timeout={grace_s}", *arguments]
    give_grace(processes.PContext, grace_s)
    launcher.LocalElasticAgent = elastic_agent(
        launcher.LocalElasticAgent, processes.SignalException
    )

    def pass_on(number: int, _frame: object) -> NoReturn:
        raise processes.SignalException(f"process {os.getpid()}", signal.Signals(number))

    for number in (signal.SIGUSR1, signal.SIGUSR2):  # a job may name a function for requests
        signal.signal(number, pass_on)
    try:
        errors.record(run.run)(run.parse_args(arguments))
    except errors.ChildFailedError as error:
        _, code = first_failure(error.failures)
        return 128 - code if code < 0 else code or 1
    except processes.SignalException as error:
        say(f"was ordered to stop by {error.sigval.name}")
        return 128 + int(error.sigval)
    except rendezvous.RendezvousError as error:
        say(f"the rendezvous is lost: {error}")
        return EX_TEMPFAIL
    return 0


def main(arguments: list[str]) -> int:
    """Launch, or print why not."""
    here = Path(__file__).resolve().parent
    # Python put this file's folder first, whose modules share names with others.
    sys.path[:] = [entry for entry in sys.path if Path(entry).resolve() != here]
    try:
        importlib.import_module("torch.distributed.run")
    except ModuleNotFoundError as error:
        say(
            f"{sys.executable} has no module {error.name}: put the environment that has PyTorch "
            "first on the job's env.PATH"
        )
        return EX_NO_TORCH
    lacks = lacking()
    if lacks:
        say(f"{lacks}, which launching under torchrun needs")
        return EX_CONFIG
    return launch(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
