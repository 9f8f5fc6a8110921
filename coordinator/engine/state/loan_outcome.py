"""Outcomes of loans, for counters, figures and rows: reclaim, lapse or turn-back, and late or not.

A reclaim is an ordered end, even if the lease lapses while the order waits for jobs. A lapse is the
end of a lease by its TTL without an order. A turn-back is a loan that its node gave up before it
began, for example because a GPU did not become free, also without an order. Only a node that had
left its service has a promised time for its return.
"""

from __future__ import annotations

from collections.abc import Iterable

from msgspec import Struct

from coordinator.engine.state.tables import LoanEntry


class Tally(Struct, frozen=True, kw_only=True):
    """Some loans, counted; late ones are among the others."""

    reclaims: int = 0
    reclaims_late: int = 0
    lapses: int = 0
    lapses_late: int = 0
    turn_backs: int = 0
    turn_backs_late: int = 0


def tally(loans: Iterable[LoanEntry], now_s: float) -> Tally:
    """Outcomes of loans, including those under way or overdue."""
    reclaims: list[bool] = []
    lapses: list[bool] = []
    turn_backs: list[bool] = []
    for loan in loans:
        is_behind = is_late(loan) or overdue_s(loan, now_s) > 0
        if is_turn_back(loan):
            turn_backs.append(is_behind)
        elif is_lapse(loan):
            lapses.append(is_behind)
        elif is_reclaim(loan) or is_behind:
            reclaims.append(is_behind)
    return Tally(
        reclaims=len(reclaims),
        reclaims_late=sum(reclaims),
        lapses=len(lapses),
        lapses_late=sum(lapses),
        turn_backs=len(turn_backs),
        turn_backs_late=sum(turn_backs),
    )


def has_left(loan: LoanEntry) -> bool:
    """True if its node is known to have left its service, so that its way home is a return.

    A loan that was recalled first may still have begun between two reports. A draining node is out
    of the routing. If it is recalled then and serves again in time, its service hardly missed it.
    If it is reported draining past its deadline, it was away like any other. For a node without
    reports meanwhile, the length of the drain is unknown.
    """
    return loan.begun_at_s is not None or loan.is_server_stopped or loan.is_drain_late


def is_reclaim(loan: LoanEntry) -> bool:
    """Whether a node that had left was ordered home, as far as is known by now."""
    return loan.reclaim_ordered_at_s is not None and has_left(loan)


def is_lapse(loan: LoanEntry) -> bool:
    """True if its lease ended by its TTL without an order to return."""
    return loan.is_lapsed and loan.reclaim_ordered_at_s is None


def is_turn_back(loan: LoanEntry) -> bool:
    """True if its node gave it up before it began, without an order to return."""
    return bool(loan.turned_back) and loan.reclaim_ordered_at_s is None


def reclaim_s(loan: LoanEntry) -> float | None:
    """Seconds from the order to serving again. None if it is no reclaim, or if its node is not home
    or will not come home by this loan.
    """
    if not is_reclaim(loan) or loan.ended_reason or loan.returned_at_s is None:
        return None
    assert loan.reclaim_ordered_at_s is not None
    return loan.returned_at_s - loan.reclaim_ordered_at_s


def lapse_s(loan: LoanEntry) -> float | None:
    """Seconds from a lease's end without an order to serving again; None for any other loan."""
    return loan.lapse_s if is_lapse(loan) else None


def turn_back_s(loan: LoanEntry) -> float | None:
    """Seconds from a turn-back without an order to serving again; None for any other loan."""
    return loan.turn_back_s if is_turn_back(loan) else None


def is_late(loan: LoanEntry) -> bool:
    """True if a finished return broke a promise; never for a node that had not left.

    From the order it has the deadline. A lapse has the rest of it after the TTL: no order was
    given, but its service has the promise from the last renewal on. A node is lent only where TTL
    and return fit into the deadline. A turn-back has all of it: its service, which might have
    ordered the return at that time, had not begun to. Both promises hold for an order that waited
    when the lease lapsed or the node turned back. A loan that ended otherwise was late if a
    deadline was over by then.
    """
    if not has_left(loan) or loan.returned_at_s is None:
        return False
    return any(took_s > within_s for took_s, within_s in _promises(loan, loan.returned_at_s))


def overdue_s(loan: LoanEntry, now_s: float) -> float:
    """Seconds past its deadline of a node that was recalled, lapsed or turned back; 0: not late.

    A node that is home is not overdue any more, however late it came.
    """
    if loan.returned_at_s is not None:
        return 0.0
    over_s = [took_s - within_s for took_s, within_s in _promises(loan, now_s)]
    return max(0.0, *over_s) if over_s else 0.0


def _promises(loan: LoanEntry, until_s: float) -> list[tuple[float, float]]:
    """How long each way home took until an instant, and how long it may take, in seconds."""
    found: list[tuple[float, float]] = []
    if loan.reclaim_ordered_at_s is not None and loan.reclaim_deadline_s is not None:
        found.append((until_s - loan.reclaim_ordered_at_s, loan.reclaim_deadline_s))
    if loan.lapsed_at_s is not None and loan.lapse_deadline_s is not None and has_left(loan):
        measured_s = loan.lapse_s  # by the node itself, once it is home
        took_s = until_s - loan.lapsed_at_s if measured_s is None else measured_s
        found.append((took_s, loan.lapse_deadline_s))
    turned_at_s, within_s = loan.turned_back_at_s, loan.turn_back_deadline_s
    if turned_at_s is not None and within_s is not None and has_left(loan):
        measured_s = loan.turn_back_s
        found.append((until_s - turned_at_s if measured_s is None else measured_s, within_s))
    return found
