"""Elastic training with Lightning that knows nothing of Aryl: it saves as it goes, and resumes.

When the workers change, the steps since the last save are trained again: choose how often to save
by what they cost. What torchrun tells it is all that it takes to follow the number of workers.
"""

import os
import time

import lightning
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader, TensorDataset

TOTAL_STEPS = int(os.environ.get("STEPS", "2000"))
STEP_S = float(os.environ.get("STEP_S", "0.1"))
"""So long a real model would compute; this one is tiny."""
STEPS_PER_SAVE = 20


class Model(lightning.LightningModule):
    """A line through points that lie on one."""

    def __init__(self) -> None:
        super().__init__()
        self.net = torch.nn.Linear(4, 1)

    def training_step(self, batch: list[torch.Tensor], batch_index: int) -> torch.Tensor:
        """Mean squared error of a batch."""
        time.sleep(STEP_S)
        inputs, targets = batch
        loss = ((self.net(inputs) - targets) ** 2).mean()
        if self.global_rank == 0 and self.global_step % 10 == 0:
            print(f"step {self.global_step} of {self.trainer.world_size}: {loss:.6f}", flush=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Plain gradient descent."""
        return torch.optim.SGD(self.parameters(), 0.02)


def main() -> None:
    """Fit, from the last checkpoint if there is one."""
    inputs = torch.randn(4096, 4, generator=torch.Generator().manual_seed(0))
    targets = inputs @ torch.tensor([[1.0], [-2.0], [0.5], [3.0]])
    saves = ModelCheckpoint(
        dirpath=os.environ["ARYL_CHECKPOINT_PATH"],
        every_n_train_steps=STEPS_PER_SAVE,
        save_last=True,
    )
    trainer = lightning.Trainer(
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["GROUP_WORLD_SIZE"]),
        strategy="ddp",
        max_steps=TOTAL_STEPS,
        max_epochs=-1,
        callbacks=[saves],
        logger=False,
        enable_progress_bar=False,
    )
    data = DataLoader(TensorDataset(inputs, targets), batch_size=16)
    trainer.fit(Model(), data, ckpt_path="last")


if __name__ == "__main__":
    main()
