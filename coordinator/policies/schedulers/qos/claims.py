"""Claims of jobs on a GPU type: sizes, remaining work, and the time that changes take. Pure.

A deadline is the gang's, so a pre-run claims what its gang does. The pre-run counts as the start of
that claim: it does nothing for the deadline, on GPUs that the gang then uses (ours).
"""

from __future__ import annotations

from math import inf

from msgspec import structs

from common.model import JobState, Preemptibility
from coordinator.policies.contract.job_groups import Behind
from coordinator.policies.contract.snapshot import ClusterSnapshot, JobView
from coordinator.policies.parts.restart_cost import loss_gpu_s
from coordinator.policies.schedulers.qos.applicants import gang_of, is_start_of_gang
from coordinator.policies.schedulers.qos.minimum_shares import Claim
from coordinator.policies.schedulers.qos.overheads import (
    AWAY,
    NONE,
    Overheads,
    changes_of,
    has_costs,
    left_s,
    seen,
)
from coordinator.policies.schedulers.qos.sizes import claim_of, sizes_of
from coordinator.policies.tenants.tenancy import Tenancy


class Claims:
    """Claims of the jobs of one snapshot.

    has_costs: whether any start or change takes time. overheads: measured for attempts now.

    Args:
        before: measured for attempts before.
        margin: of the remaining work. restart_s: the cost of a stop beside work. powers_of_two: of
            sizes.
        tenancy: whose quotas bind; None: none.
    """

    def __init__(
        self,
        snapshot: ClusterSnapshot,
        before: Overheads,
        *,
        margin: float,
        restart_s: float,
        powers_of_two: bool,
        tenancy: Tenancy | None,
    ) -> None:
        self._snapshot = snapshot
        self._margin = margin
        self._restart_s = restart_s
        self._powers_of_two = powers_of_two
        self._tenancy = tenancy
        self.has_costs = has_costs(snapshot)
        self.overheads = seen(before, snapshot)

    def of(self, job: JobView, kind: str, gpus: int) -> Claim:
        """The claim of a job on a number of GPUs of a type.

        Where changes take time, the part that its estimate does not include is added.
        """
        if is_start_of_gang(job) and job.behind is not None:
            return self._with_gang(job, job.behind, kind, gpus)
        now_s = self._snapshot.now_s
        factor = job.gpu.worker_multiplier.get(kind, 1)
        most = gpus // (job.gpus_per_worker * factor)
        overhead = self.overheads.get(job.job_id, NONE)
        return claim_of(
            job,
            now_s,
            sizes_of(job, most, powers_of_two=self._powers_of_two),
            left_s=left_s(job, overhead, now_s) if self.has_costs else job.estimate_left_s(now_s),
            margin=self._margin,
            restart_s=self._restart_s,
            factor=factor,
            changes=changes_of(job, overhead, self._snapshot),
            tenant="" if self._tenancy is None else self._tenancy.leaf(job),
        )

    def _with_gang(self, job: JobView, behind: Behind, kind: str, gpus: int) -> Claim:
        """The claim of a pre-run with a deadline: its gang's plan, with itself as the start."""
        now_s = self._snapshot.now_s
        overhead = self.overheads.get(job.job_id, NONE)
        changes = changes_of(job, overhead, self._snapshot)
        begins_s, again_s = (changes.begins_s, changes.again_s) if changes else (0.0, 0.0)
        whole_s, runs = job.estimate.whole_work_s, job.state not in AWAY
        may_stop = not runs or job.preemptibility == Preemptibility.FULL
        is_over = job.state == JobState.PREEMPTING and job.estimate.remaining_work_s <= 0.0
        rest_s = job.work_left_s(now_s) if runs or is_over else whole_s
        gang = gang_of(job)
        factor = job.gpu.worker_multiplier.get(kind, 1)
        most = gpus // (gang.gpus_per_worker * factor)
        sizes = sizes_of(gang, most, powers_of_two=self._powers_of_two)
        claim = claim_of(
            gang,
            now_s,
            sizes,
            left_s=behind.work_s,
            margin=self._margin,
            restart_s=self._restart_s,
            factor=factor,
            changes=changes,
            tenant="" if self._tenancy is None else self._tenancy.leaf(job),
        )
        return structs.replace(
            claim,
            pauses=False,
            redo_s=0.0 if may_stop else inf,
            stop_gpu_s=loss_gpu_s(job, now_s) if runs else 0.0,
            keeps=not may_stop,
            present=sizes[0] if runs and sizes else 0,
            begins_s=begins_s + rest_s + again_s,
            again_s=again_s + whole_s + again_s,
        )
