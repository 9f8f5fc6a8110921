"""What each job claims of a GPU type: its sizes, its work left, and what changes take. Pure.

Must not know which claims can be promised, nor a policy.
"""

from __future__ import annotations

from coordinator.policies.deadlines.overheads import (
    NONE,
    Overheads,
    changes_of,
    has_costs,
    left_s,
    seen,
)
from coordinator.policies.deadlines.shares import Claim
from coordinator.policies.deadlines.sizes import claim_of, sizes_of
from coordinator.policies.snapshot import ClusterSnapshot, JobView
from coordinator.policies.tenants.tenancy import Tenancy


class Claims:
    """Claims of the jobs of one snapshot.

    has_costs: whether any start or change takes time. overheads: what is known of attempts now.

    Args:
        before: what was known of attempts before.
        margin: of what is left. restart_s: what a stop costs beside work. powers_of_two: of sizes.
        tenancy: whose quotas bind; None: nobody's.
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
        """What a job claims of so many GPUs of a type.

        Where changes take time, what its estimate does not see is left as well.
        """
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
