"""Elastic training with DistributedDataParallel that loses no step when its workers change.

DDP cannot lose a rank: the next collective of the others fails, or hangs. So after each step all
ranks agree whether somebody has to leave. If so they save together, those who have to leave exit
with 0, and the others exit with 75: the launcher under them sees that the members have changed,
lets those that stay meet again and starts their ranks anew, from what was saved.

Each rank takes its part of one global batch, so the training is the same with any number of them.
"""

import os
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from control import Control

TOTAL_STEPS = int(os.environ.get("STEPS", "2000"))
STEP_S = float(os.environ.get("STEP_S", "0.1"))
"""So long a real model would compute; this one is tiny."""
STEPS_PER_SAVE = 50
GLOBAL_BATCH = 256
CHECKPOINT = Path(os.environ["ARYL_CHECKPOINT_PATH"])
CURVE = CHECKPOINT.with_suffix(".csv")
"""Time, step, ranks, loss and process of every step."""
OTHERS_LEAVE = 75
STAYS, LEAVES, ALL_LEAVE = 0, 1, 2


def wishes(control: Control, device: torch.device) -> list[int]:
    """What each worker has been asked to do; the same list on every rank."""
    wish = STAYS
    if control.reason:
        wish = LEAVES if control.reason in ("release", "signal") else ALL_LEAVE
    of_all = torch.zeros(int(os.environ["GROUP_WORLD_SIZE"]), device=device)
    of_all[int(os.environ["GROUP_RANK"])] = wish
    dist.all_reduce(of_all, op=dist.ReduceOp.MAX)
    return [int(wish) for wish in of_all]


def batch(step: int, rank: int, world_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """This rank's part of the global batch of a step."""
    generator = torch.Generator().manual_seed(step)
    inputs = torch.randn(GLOBAL_BATCH, 16, generator=generator)[rank::world_size]
    return inputs, (inputs @ torch.linspace(-1, 1, 16)).tanh().unsqueeze(1)


def set_up() -> torch.device:
    """Meet the other ranks; the device of this one."""
    torch.manual_seed(0)
    if not torch.cuda.is_available():
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"]))
    torch.cuda.set_device(device)
    dist.init_process_group("nccl")
    return device


class Trainer:
    """The model with all that a save holds of it."""

    def __init__(self, control: Control, device: torch.device) -> None:
        layers = (torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 1))
        self.net = torch.nn.Sequential(*layers).to(device)
        self.model = DistributedDataParallel(self.net)
        self.optimizer = torch.optim.SGD(self.net.parameters(), lr=0.05)
        self.step = 0
        self.control = control
        self.device = device
        if CHECKPOINT.exists():
            state = torch.load(CHECKPOINT, map_location=device)
            self.net.load_state_dict(state["net"])
            self.optimizer.load_state_dict(state["optimizer"])
            self.step = state["step"]

    def save(self) -> None:
        """Whole or not at all, by rank 0; nobody goes on before."""
        if dist.get_rank() == 0:
            state = {"net": self.net.state_dict(), "optimizer": self.optimizer.state_dict()}
            draft = CHECKPOINT.with_suffix(".tmp")
            with draft.open("wb") as file:
                torch.save(state | {"step": self.step}, file)
                file.flush()
                os.fsync(file.fileno())
            draft.replace(CHECKPOINT)
            self.control.saved(self.step, str(CHECKPOINT))
        dist.barrier()

    def do_step(self) -> None:
        """One step of all ranks together; rank 0 tells of it."""
        rank, world_size = dist.get_rank(), dist.get_world_size()
        inputs, targets = (part.to(self.device) for part in batch(self.step, rank, world_size))
        loss = ((self.model(inputs) - targets) ** 2).mean()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        self.step += 1
        time.sleep(STEP_S)
        if rank == 0:
            self.control.progress(self.step, TOTAL_STEPS, loss.item())
            with CURVE.open("a") as file:
                row = f"{time.time():.3f},{self.step},{world_size},{loss.item():.6f}"
                file.write(f"{row},{os.getpid()}\n")


def main() -> int:
    """Train until the last step, or until somebody has to leave."""
    control = Control()
    device = set_up()
    trainer = Trainer(control, device)
    print(f"begins at step {trainer.step} as rank {dist.get_rank()} of {dist.get_world_size()}")
    while trainer.step < TOTAL_STEPS:
        trainer.do_step()
        wished = wishes(control, device)
        if any(wished):
            if control.reason:
                control.working(eta_s=5.0)
            trainer.save()
            if control.reason:
                control.released()
            # All are in here together, and all have saved: nobody waits for anybody any more.
            mine = wished[int(os.environ["GROUP_RANK"])]
            return 0 if mine or ALL_LEAVE in wished else OTHERS_LEAVE
        if trainer.step % STEPS_PER_SAVE == 0:
            trainer.save()
    trainer.save()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
