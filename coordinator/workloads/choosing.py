"""Choose a share of jobs by seed alone.

Each job draws one number in the order of the job ids, and the smallest draws are chosen. So 20 % is
part of 40 %, and neither the order of the input nor the hash seed matters. Each purpose has draws
of its own (`Draw`): with one seed, the elastic jobs differ from the fungible ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from enum import IntEnum
from random import Random

from coordinator.workloads.records import TraceJob


class Draw(IntEnum):
    """The purpose of a draw. Within one, a larger share chooses more of the same jobs."""

    ELASTIC = 0
    SPANNING = 1
    """Both GPU types in one run."""
    FUNGIBLE = 2
    SAVING = 3
    PAPER = 0
    """The draws of the named workloads, each used once; their bytes are frozen."""
    WRONG = 0
    """Given a wrong running time: as for elastic jobs, by which the rows of Table 9 were played;
    the named workloads draw no ranges.
    """


_DRAWS_APART = 1 << 40
"""Between the random seeds of two draws, beyond all seeds that a person gives."""


def choose(
    jobs: Sequence[TraceJob],
    share: float,
    seed: int,
    *,
    draw: Draw,
    among: Callable[[TraceJob], bool] = lambda _: True,
) -> frozenset[str]:
    """The ids of the jobs that a share falls on; nested: a larger share chooses these and more.

    share: of the jobs that `among` accepts, 0 to 1, rounded to whole jobs.

    Raises:
        ValueError: a share outside of 0 to 1.
    """
    if not 0.0 <= share <= 1.0:
        raise ValueError(f"share {share}, expected 0 to 1")
    random = Random(seed + draw * _DRAWS_APART)
    draws = sorted((random.random(), job_id) for job_id in sorted(job.job_id for job in jobs))
    accepted = {job.job_id for job in jobs if among(job)}
    ordered = [job_id for _, job_id in draws if job_id in accepted]
    return frozenset(ordered[: round(share * len(ordered))])
