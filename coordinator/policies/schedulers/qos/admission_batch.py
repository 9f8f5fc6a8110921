"""The newcomers that one pass answers: in turn, until the pass has done enough work. Pure."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from coordinator.policies.schedulers.qos.admission import Book
from coordinator.policies.schedulers.qos.minimum_shares import Claim

MOST_PLANS = 32_768
"""Plans of single jobs behind which no more are answered, some seconds of work at most: a crowd
must not keep whatever else happens in the cell waiting until the last of it has its answer."""
AGAIN_S = 1.0
"""After a pass that left some without an answer, the next one is wanted after this time: events
meanwhile come in between.
"""


def answer(
    book: Book,
    newcomers: Sequence[Claim],
    refuse: Callable[[Claim], None],
    *,
    tried: Callable[[], int] | None = None,
    together: bool = False,
    most_plans: int = MOST_PLANS,
) -> Sequence[Claim]:
    """Promise newcomers their deadlines in turn, or refuse them; returns those that a later pass
    answers.

    The first always gets its answer.

    Args:
        refuse: called for each that is not admitted, while the promises are as at its request.
        tried: plans of single jobs that were computed so far; None: in this book.
        together: all are admitted or none, but for those that never fit.
        most_plans: of single jobs, after which no more are answered.
    """
    tried = tried or (lambda: book.tried)
    before = tried()
    if together:
        for claim in newcomers:
            if not claim.sizes:
                refuse(claim)
        newcomers = [claim for claim in newcomers if claim.sizes]
    size = max(1, len(newcomers)) if together else 1
    for at in range(0, len(newcomers), size):
        if at and tried() - before >= most_plans:
            return newcomers[at:]
        group = newcomers[at : at + size]
        if not book.admit(group):
            for claim in group:
                refuse(claim)
    return ()
