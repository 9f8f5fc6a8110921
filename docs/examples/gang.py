"""A gang of one size without a launcher: each worker is one rank, and all of them meet at worker 0.

Such a gang starts whole or not at all. It is preempted as a whole, and then goes on from its save.
"""

import os
import signal
import sys
import time
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist

TOTAL_STEPS = int(os.environ.get("STEPS", "600"))
STEP_S = float(os.environ.get("STEP_S", "0.1"))
"""So long a real model would compute."""
CHECKPOINT = Path(os.environ["ARYL_CHECKPOINT_PATH"])

has_to_leave = False


def on_signal(number: int, frame: object) -> None:
    """A job that says nothing on the control socket is asked by its signal."""
    global has_to_leave
    has_to_leave = True


def main() -> int:
    """Train until the last step, or until any rank is asked to leave: then all leave."""
    signal.signal(signal.SIGTERM, on_signal)
    torch.set_num_threads(1)
    dist.init_process_group(
        "gloo",
        init_method=f"tcp://{os.environ['ARYL_RENDEZVOUS_ENDPOINT']}",
        rank=int(os.environ["ARYL_WORKER_INDEX"]),
        world_size=int(os.environ["ARYL_WORKER_COUNT"]),
        timeout=timedelta(minutes=5),
    )
    rank = dist.get_rank()
    weights = torch.zeros(4)
    step = 0
    if CHECKPOINT.exists():
        step, weights = torch.load(CHECKPOINT).values()
    print(f"rank {rank} of {dist.get_world_size()} begins at step {step}", flush=True)
    is_leaving = torch.zeros(1)
    while step < TOTAL_STEPS and not is_leaving:
        gradient = weights - torch.tensor([1.0, 2.0, 3.0, 4.0])
        dist.all_reduce(gradient, op=dist.ReduceOp.SUM)
        weights -= 0.01 * gradient / dist.get_world_size()
        step += 1
        time.sleep(STEP_S)
        is_leaving = torch.tensor([float(has_to_leave)])
        dist.all_reduce(is_leaving, op=dist.ReduceOp.MAX)
    if rank == 0:
        draft = CHECKPOINT.with_suffix(".tmp")
        torch.save({"step": step, "weights": weights}, draft)
        draft.replace(CHECKPOINT)
        print(f"saved step {step}", flush=True)
    dist.barrier()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
