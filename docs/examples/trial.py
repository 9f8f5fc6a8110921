"""One trial of a sweep: fits one learning rate and prints its loss. Standard library alone.

Trials of one sweep are jobs of one `app`. They are alike and stand alone: each takes any GPU, and
one that fails takes no other with it.
"""

import json
import os
import sys
import time
from pathlib import Path

TOTAL_STEPS = int(os.environ.get("STEPS", "100"))
STEP_S = 0.1
CHECKPOINT = Path(os.environ["ARYL_CHECKPOINT_PATH"])


def main() -> int:
    """Walk down a parabola; save after each step, as they are cheap."""
    rate = float(os.environ["RATE"])
    state = {"step": 0, "at": 10.0}
    if CHECKPOINT.exists():
        state = json.loads(CHECKPOINT.read_text())
    while state["step"] < TOTAL_STEPS:
        state = {"step": state["step"] + 1, "at": state["at"] - rate * 2 * state["at"]}
        time.sleep(STEP_S)
        draft = CHECKPOINT.with_suffix(".tmp")
        draft.write_text(json.dumps(state))
        draft.replace(CHECKPOINT)
    print(f"rate {rate:g}: loss {state['at'] ** 2:.6g} after {state['step']} steps", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
