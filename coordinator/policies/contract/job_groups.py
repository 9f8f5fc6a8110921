"""Fields of a job that belong together, as `JobView` has them.

The groups are frozen, and snapshots share them. A job of which a group has nothing to say has the
constant below the group.
"""

from __future__ import annotations

from msgspec import Struct

from common.model import NodeName, WorkerRange


class EstimateView(Struct, frozen=True, kw_only=True):
    """How much work a job is, in worker-seconds on its reference GPU type.

    remaining_work_s: left at `as_of_s` by the best estimate; running time at n workers is that / n.
        It falls by `work_rate` a second, not below `least_work_s`, and grows once the estimate is
        outlived: `JobView.work_left_s` gives it at any instant.
    source: of the estimate; see `estimates.Source`.
    work_rate: worker-seconds of work that it does per second.
    estimated_left_s: left at `as_of_s` by the estimate alone, below zero when the job has outlived
        it; `remaining_work_s` is never less than that without its sign. None: no such estimate.
    whole_work_s: the whole job by the estimate at its submission.
    """

    remaining_work_s: float
    source: str
    work_rate: float = 0
    least_work_s: float = 0.0
    estimated_left_s: float | None = None
    whole_work_s: float = 0.0


class SavesView(Struct, frozen=True, kw_only=True):
    """What a job has saved, and so what a preemption throws away.

    unsaved_gpu_s: GPU-seconds since its last verified checkpoint at `as_of_s`; they grow by
        `unsaved_gpus` a second: `JobView.lost_gpu_s`.
    has_saved: its present attempt has verified a checkpoint.
    saves_when_asked: it declares that it saves within its grace when it is stopped.
    """

    unsaved_gpu_s: float = 0.0
    unsaved_gpus: float = 0
    has_saved: bool = False
    saves_when_asked: bool = False


NOTHING_TO_SAVE = SavesView()


class ProgressView(Struct, frozen=True, kw_only=True):
    """How far a job has come.

    attained_gpu_s: GPU-seconds that it has computed in all its attempts at `as_of_s`; they grow by
        `computing_gpus` a second: `JobView.attained_service_gpu_s`.
    step: of its last report; None: it reports none.
    step_gpu_s: the GPU-seconds that it had attained by that report.
    """

    attained_gpu_s: float = 0.0
    computing_gpus: float = 0
    step: int | None = None
    step_gpu_s: float = 0.0


NO_PROGRESS = ProgressView()


class StepTimesView(Struct, frozen=True, kw_only=True):
    """The measured step time of a job.

    step_time_s: seconds per step with `workers` workers on `gpu_type` (empty: not known); None
        before two reports of one worker count.
    steps_left: at `as_of_s`, by its last report; None: not known.
    """

    step_time_s: float | None = None
    workers: int = 0
    gpu_type: str = ""
    steps_left: float | None = None


NO_STEP_TIMES = StepTimesView()


class AttemptView(Struct, frozen=True, kw_only=True):
    """The present attempt of a job; while it waits, the rest of its latest one.

    number: it grows at each start; 0: the job never started.
    started_at_s: when it began to run; None before, and once it is over.
    first_started_at_s: when the first attempt of the job ran; None before.
    suspended_at_s: since when it is suspended; None while it is not.
    is_packed: it may compute beside one other on its GPUs; see `decisions.Resume`.
    """

    number: int = 0
    started_at_s: float | None = None
    first_started_at_s: float | None = None
    suspended_at_s: float | None = None
    is_packed: bool = False


NO_ATTEMPT = AttemptView()


class BackOff(Struct, frozen=True, kw_only=True):
    """How often in a row guarantees reclaimed GPUs from a job, and until when it borrows none of
    these.

    tenants: the owners of the guarantees. count: stops in a row. since_s: the latest of them.
    until_s: not after `since_s` while they are too few.
    """

    tenants: tuple[str, ...]
    count: int
    since_s: float
    until_s: float


class PreemptionsView(Struct, frozen=True, kw_only=True):
    """The preemptions of a job so far.

    latest_at_s: when the latest was ordered; None: none was.
    wasted_gpu_s: GPU-seconds that they lost, whatever the job declares.
    back_off: guarantees called it back; None: never, or not since it did well.
    """

    count: int = 0
    latest_at_s: float | None = None
    wasted_gpu_s: float = 0.0
    back_off: BackOff | None = None


NO_PREEMPTIONS = PreemptionsView()


class ResizesView(Struct, frozen=True, kw_only=True):
    """The resizes of a job so far.

    latest_at_s: when the latest was ordered; None: none was.
    cost_s: running time that a resize of it costs, as measured of its latest ones; None: none was.
    """

    latest_at_s: float | None = None
    cost_s: float | None = None


NO_RESIZES = ResizesView()


class NodeLimits(Struct, frozen=True, kw_only=True):
    """On which nodes a job may not run, and for how long it holds those that it gets.

    avoided: nodes that its workers leave alone: it failed there, may run beyond their close, or may
        not use them.
    excluded: those of them that it may never use as they are, by the labels and names that it
        selects.
    longest_s: the longest that an attempt of it holds its nodes, from the decision; None: it has no
        time limit, or no node closes.
    wants_no_loan: nodes could not start it just now, maybe because of its own storage: it may use
        lent nodes, but no further node is to be lent for it.
    """

    avoided: tuple[NodeName, ...] = ()
    excluded: tuple[NodeName, ...] = ()
    longest_s: float | None = None
    wants_no_loan: bool = False


ANY_NODE = NodeLimits()


class Behind(Struct, frozen=True, kw_only=True):
    """The gang that a job is after its pre-run. work_s: worker-seconds of it, by the estimate."""

    workers: WorkerRange
    gpus_per_worker: int
    work_s: float
    estimate_source: str
