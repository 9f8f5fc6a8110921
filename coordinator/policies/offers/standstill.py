"""Whether a cell stands still: the same free GPUs and the same jobs that wait, and since when.

Turns that pass round what is free need not end with a start; who has seen that nothing changes for
long enough may stop them. Must not know whose turn it is, nor how long is long enough.
"""

from __future__ import annotations

from zlib import crc32

import msgspec
from msgspec import Struct

from common.model import JobState
from coordinator.policies.snapshot import ClusterSnapshot


class Still(Struct, frozen=True):
    """What was seen last, in a few bits, since when it is so, and for how many passes after it."""

    seen: int = 0
    since_s: float = 0.0
    passes: int = 0

    def after(self, snapshot: ClusterSnapshot) -> Still:
        """As of one more pass."""
        seen = _seen(snapshot)
        if seen != self.seen:
            return Still(seen, snapshot.now_s)
        return Still(seen, self.since_s, self.passes + 1)

    def outlasts(self, now_s: float, *, least_s: float, passes: int) -> bool:
        """Whether nothing has changed for longer than that, and for more passes than these."""
        return now_s > self.since_s + least_s and self.passes > passes


def _seen(snapshot: ClusterSnapshot) -> int:
    free = [(node.name, node.free_gpus) for node in snapshot.nodes if node.is_schedulable]
    # Who waits again is offered anew, and after its pre-run asks for another gang.
    jobs = [(job.job_id, job.attempt) for job in snapshot.jobs if job.state == JobState.PENDING]
    return crc32(msgspec.msgpack.encode((free, jobs)))
