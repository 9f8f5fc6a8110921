"""Reasons for the size of a job, as sentences."""

from __future__ import annotations

from coordinator.policies.aryl.elastic_jobs import Share
from coordinator.policies.contract.cooldown import resizable_at_s
from coordinator.policies.contract.decisions import placed_count
from coordinator.policies.contract.snapshot import ClusterSnapshot
from coordinator.policies.contract.text import counted


def why_not_larger(
    snapshot: ClusterSnapshot, share: Share, *, resize_cost_s: float, is_barred: bool
) -> tuple[str, ...]:
    """Why a running job has no more workers after a tried pass; empty for one that has all it may
    have.

    is_barred: no job grows, because jobs wait.
    """
    job = share.job
    if share.current >= share.span.max - share.span.min and share.current <= share.most:
        return ()
    if share.removed:
        return (_why_fewer(share),)
    if share.added:
        return (f"the next pass gives it {counted(placed_count(share.added), 'worker')} more",)
    if share.current >= share.most:
        return (_at_best(share, resize_cost_s),)
    rest_s = resizable_at_s(snapshot, job)
    if rest_s is not None:
        return (
            f"it was just resized and is not resized again for {rest_s - snapshot.now_s:.0f} s",
        )
    if is_barred:
        return ("it does not grow while jobs wait",)
    is_measured = job.resizes.cost_s is not None  # then one resize costs as much as another
    target = share.most if is_measured else share.next_count(share.count)
    now_left_s = share.left_s(share.count, spans_types=share.spans_types)
    saved_s = now_left_s - share.left_s(target, spans_types=share.spans_types)
    more = target - share.count
    cost_s = share.change_cost_s(resize_cost_s, more)
    if share.weight * saved_s <= cost_s:
        would = "one worker more would save" if more == 1 else f"{more} workers more would save"
        return (
            f"it does not grow: {would} {saved_s:.1f} s of its estimated remaining time, and a "
            f"resize {'was measured to cost' if is_measured else 'costs'} {cost_s:.4g} s",
        )
    target = share.next_count(share.count)  # room for this many is enough, whatever was measured
    if target > share.count + 1:
        return (
            f"it does not grow: by its profile it is faster next with {share.span.min + target} "
            f"workers, and there is no room for {target - share.count} more on GPUs of type "
            f"{share.gpu_type}, by which no running job gains less",
        )
    return (
        f"it does not grow: no node that its flexible workers may use has "
        f"{counted(job.gpus_per_worker, 'free GPU')} of type {share.gpu_type}, and no running job "
        f"gains less by those that it has",
    )


def _why_fewer(share: Share) -> str:
    count = len(share.removed)
    if is_faster_with_fewer(share):
        return f"the next pass takes {count} of its flexible workers: it is faster without them"
    return f"the next pass takes {count} of its flexible workers for others"


def is_faster_with_fewer(share: Share) -> bool:
    """Whether a job that shrinks is faster for it, by its profile."""
    return share.rate(share.count) > share.rate(share.current)


def _at_best(share: Share, resize_cost_s: float) -> str:
    """The reason of a job that has as many workers as make it fastest by its profile, or more."""
    if share.current == share.most:
        return f"it does not grow: it {at_best(share)}"
    base, saved_s = share.span.min, -share.loss_s(share.current - share.most)
    return (
        f"it does not grow: by its profile it is fastest with {base + share.most} workers; to go "
        f"down to them would save {max(0.0, saved_s):.1f} s, and a resize costs "
        f"{share.change_cost_s(resize_cost_s, share.current - share.most):.4g} s"
    )


def at_best(share: Share) -> str:
    """That a job ends up at its best size, to follow its name; empty when it could use more."""
    least, most = share.most, share.span.max - share.span.min
    if share.count != least or least >= most:
        return ""
    slower = "slower" if share.rate(least + 1) < share.rate(least) else "no faster"
    return (
        f"is at its best size by its profile, {counted(share.span.min + least, 'worker')}: more "
        f"would make it {slower}"
    )
