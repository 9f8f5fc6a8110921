"""A job that never saves: it scores what was trained, and starts from the beginning if it has to.

It has no `checkpoint.path`, so nothing waits for a save of it; `preemptibility = "non"` keeps it
off lent nodes, whose owners may want them back at any moment.
"""

import os
import time

TOTAL = int(os.environ.get("STEPS", "100"))
STEP_S = 0.1


def main() -> None:
    """Score one sample after the other."""
    right = 0
    for sample in range(TOTAL):
        right += sample % 10 != 0
        time.sleep(STEP_S)
    print(f"{right} of {TOTAL} right", flush=True)


if __name__ == "__main__":
    main()
