"""How much time this machine itself was away, measured by a process that does nothing else.

Run as `python -S stall_watch.py FILE`: each round sleeps `ROUND_S` and computes for a moment. A
round that took longer than it should lost time; those rounds are appended as `at_s lost_s`.
"""

from __future__ import annotations

import sys
import time
from pathlib import Path

ROUND_S = 0.1
MARGIN_S = 0.05
"""A round that was late by less lost nothing: a timer is no more exact on a busy machine."""
SLOW_RATIO = 2.0
"""A computation that took so many times as long as the fastest one had to share its core."""
COUNT = 20_000


def now_s() -> float:
    """The boot clock."""
    return time.clock_gettime(time.CLOCK_BOOTTIME)


def compute() -> float:
    """The same computation each time, of about a millisecond; how long it took."""
    begin_s = now_s()
    total = 0
    for number in range(COUNT):
        total += number
    return now_s() - begin_s


def lost_s(*, slept_s: float, computed_s: float, fastest_s: float) -> float:
    """Seconds of a round in which the machine did nothing for this process, though it was ready.

    The sleep's delay, and of the round's length the part that a computation of that slowness lost.
    """
    late_s = max(0.0, slept_s - ROUND_S)
    is_slow = computed_s > SLOW_RATIO * fastest_s
    shared_s = ROUND_S * (1 - fastest_s / computed_s) if is_slow else 0.0
    lost = late_s + shared_s
    return lost if lost > MARGIN_S else 0.0


def main() -> None:
    """Until it is killed."""
    path = Path(sys.argv[1])
    fastest_s = min(compute() for _ in range(20))
    with path.open("a", buffering=1) as file:
        while True:
            begin_s = now_s()
            time.sleep(ROUND_S)
            slept_s = now_s() - begin_s
            computed_s = compute()
            fastest_s = min(fastest_s, computed_s)
            lost = lost_s(slept_s=slept_s, computed_s=computed_s, fastest_s=fastest_s)
            if lost:
                file.write(f"{begin_s:.3f} {lost:.3f}\n")


if __name__ == "__main__":
    main()
