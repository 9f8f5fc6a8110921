"""Failures of the Philly study (ATC'19, table 7) as a source of failures.

Every chance comes from the seed and the job's name, so that a job fails in the same way under every
policy and setting.
"""

from __future__ import annotations

import random
from bisect import bisect
from functools import cached_property
from itertools import accumulate
from math import exp, log

from msgspec import Struct

MINUTE_S = 60.0
Z90, Z95 = 1.2815515655446004, 1.6448536269514722
"""Standard normal quantiles."""


class Cause(Struct, frozen=True):
    """One row: a reason in numbers; times to failure in minutes, trials by GPUs of the gang."""

    reason: str
    trials: int
    jobs: int
    users: int
    p50: float
    p90: float
    p95: float
    trials_1: int
    trials_2_4: int
    trials_above_4: int

    def trials_of(self, gpus: int) -> int:
        """Trials of gangs of that size."""
        if gpus <= 1:
            return self.trials_1
        return self.trials_2_4 if gpus <= 4 else self.trials_above_4

    def runtime_s(self, chance: float) -> float:
        """Seconds to failure at a standard normal deviate: a lognormal through the median.

        Its width is the least-squares fit to the two upper quantiles, in logarithms.
        """
        to_90, to_95 = log(self.p90 / self.p50), log(self.p95 / self.p50)
        sigma = (Z90 * to_90 + Z95 * to_95) / (Z90 * Z90 + Z95 * Z95)
        return MINUTE_S * self.p50 * exp(sigma * chance)


TABLE = (
    Cause("cpu_out_of_memory", 12076, 2803, 65, 13.45, 17.73, 33.97, 11465, 235, 376),
    Cause("incorrect_inputs", 9690, 4936, 208, 1.87, 404.83, 2095.73, 5844, 2638, 1208),
    Cause("semantic_error", 2943, 2049, 159, 2.72, 376.00, 1436.88, 1603, 494, 846),
    Cause("core_dump", 2912, 1784, 122, 0.85, 72.75, 431.65, 1936, 496, 480),
    Cause("invalid_memory_access", 2602, 1235, 108, 1.03, 403.50, 1357.38, 712, 774, 1116),
    Cause("model_checkpoint_error", 1995, 948, 85, 181.67, 3728.93, 8196.02, 743, 384, 868),
    Cause("cuda_failure", 1484, 571, 70, 1.32, 19.87, 82.17, 133, 1153, 198),
    Cause("syntax_error", 1132, 883, 110, 0.58, 5.02, 12.00, 780, 184, 168),
    Cause("traceback_from_crash", 777, 271, 44, 1.02, 894.33, 1394.07, 356, 277, 144),
    Cause("mpi_error", 634, 166, 28, 1.62, 3015.27, 5143.98, 456, 54, 124),
    Cause("gpu_out_of_memory", 487, 261, 35, 18.53, 353.62, 2740.28, 237, 70, 180),
    Cause("mpi_runtime_failure", 478, 420, 96, 1389.48, 13778.60, 18090.88, 240, 141, 97),
    Cause("permission_error", 299, 151, 37, 1.00, 8.15, 15.85, 56, 202, 41),
    Cause("import_error", 148, 148, 41, 0.67, 4.58, 10.73, 108, 30, 10),
    Cause("job_preempted", 147, 95, 34, 559.08, 2682.85, 5892.23, 25, 95, 27),
    Cause("cuda_init_failed", 141, 69, 20, 1.08, 2.18, 4.63, 16, 66, 59),
    Cause("model_diverged", 84, 30, 5, 1.48, 44.37, 76.53, 78, 5, 1),
    Cause("cuda_version_mismatch", 49, 49, 19, 0.83, 1.65, 1.67, 1, 1, 47),
    Cause("gpu_ecc_error", 10, 10, 2, 26.82, 671.92, 2035.02, 1, 5, 4),
    Cause("output_node_error", 3, 3, 1, 0.85, 0.95, 0.95, 3, 0, 0),
    Cause("cannot_load_libs", 1, 1, 1, 0.12, 0.12, 0.12, 1, 0, 0),
    Cause("no_signature", 1684, 698, 94, 1.87, 28.00, 95.17, 1235, 294, 155),
)

UNSUCCESSFUL_JOBS = 16_568
"""Over all reasons, table 6: fewer than the rows' sum, as a job can have two reasons."""
UNSUCCESSFUL_RATIOS = ((1, 0.13), (4, 0.37), (8, 0.42))
"""Fraction of the jobs of at most this many GPUs that ended without success (figure 9)."""
UNSUCCESSFUL_ABOVE = 0.47


class Trouble(Struct, frozen=True, kw_only=True):
    """How one job fails.

    trials: its first attempts, this many of them, fail; None: every one does.
    times_s: seconds from the start of an attempt to its failure, one after another, the last one
        for all later ones; as the base gang computes without a stop in between.
    """

    reason: str
    trials: int | None
    times_s: tuple[float, ...]

    def after_s(self, failed_before: int) -> float | None:
        """After how long the next attempt fails; None: it does not."""
        if self.trials is not None and failed_before >= self.trials:
            return None
        return self.times_s[min(failed_before, len(self.times_s) - 1)]


class PhillyFailures:
    """Draws whose jobs fail, why, when and how often.

    A job's reason is drawn by the table's column for its size, among the reasons that its user is
    prone to: a reason that many users had is more likely to be one of any user's, and who has it
    has it again (section 4.2.2: the top reasons repeat 38.8 times a user). Of a reason that no
    retry helps every attempt fails, at the same time; the others fail in the table's mean number of
    attempts per job, drawn geometrically, each at a time of its own.

    Args:
        persistent: reasons of which every attempt fails. Empty: all of them are drawn.
    """

    def __init__(self, seed: int, persistent: frozenset[str]) -> None:
        self._seed = seed
        self._persistent = persistent

    @cached_property
    def _most_users(self) -> int:
        return max(cause.users for cause in TABLE)

    def trouble(self, job: str, user: str, gpus: int) -> Trouble | None:
        """The failure of a job of this many GPUs; None: it does not fail."""
        draw = random.Random(f"{self._seed}/{job}")
        if draw.random() >= troubled_ratio(gpus):
            return None
        cause = self._cause(draw, user, gpus)
        if cause.reason in self._persistent:
            return Trouble(
                reason=cause.reason, trials=None, times_s=(cause.runtime_s(draw.gauss()),)
            )
        trials = 1
        while draw.random() < 1.0 - cause.jobs / cause.trials:
            trials += 1
        times = tuple(cause.runtime_s(draw.gauss()) for _ in range(trials))
        return Trouble(reason=cause.reason, trials=trials, times_s=times)

    def _cause(self, draw: random.Random, user: str, gpus: int) -> Cause:
        # A troubled job is one of the row's jobs: trials are shared among them evenly.
        weights = [cause.trials_of(gpus) * cause.jobs / cause.trials for cause in TABLE]
        own = [
            weight / self._prone(cause) if self._is_prone(user, cause) else 0.0
            for weight, cause in zip(weights, TABLE, strict=True)
        ]
        sums = list(accumulate(own if any(own) else weights))
        return TABLE[bisect(sums, draw.random() * sums[-1])]

    def _prone(self, cause: Cause) -> float:
        return cause.users / self._most_users

    def _is_prone(self, user: str, cause: Cause) -> bool:
        chance = random.Random(f"{self._seed}/{user}/{cause.reason}").random()
        return chance < self._prone(cause)


def troubled_ratio(gpus: int) -> float:
    """Part of the jobs of a size that fail at least once.

    Those without success, and in proportion those that succeeded after a failure: the rows' jobs
    are more than the unsuccessful ones.
    """
    factor = sum(cause.jobs for cause in TABLE) / UNSUCCESSFUL_JOBS
    for most, ratio in UNSUCCESSFUL_RATIOS:
        if gpus <= most:
            return ratio * factor
    return UNSUCCESSFUL_ABOVE * factor
