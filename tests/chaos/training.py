"""A training on handwritten digits that goes on from its last checkpoint when it is started again."""

from __future__ import annotations

import os
import pathlib
import time

import torch
from torch.utils.data import DataLoader, TensorDataset

from notebook_accel import Accelerator, ProjectConfiguration
from notebook_accel.utils import set_seed

EPOCHS = 2
SAVE_EVERY = 4


class Steps:
    def __init__(self) -> None:
        self.done = 0

    def state_dict(self) -> dict[str, int]:
        return {"done": self.done}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.done = state["done"]


def train(
    images: torch.Tensor, labels: torch.Tensor, folder: str, step_s: float = 0.0
) -> tuple[int, int, dict[str, torch.Tensor]]:
    """The step that it went on from, how often it was started again, and the weights."""
    set_seed(0)
    configuration = ProjectConfiguration(folder, automatic_checkpoint_naming=True, total_limit=2)
    accelerator = Accelerator(project_config=configuration)
    model = torch.nn.Sequential(
        torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Dropout(0.2), torch.nn.Linear(32, 10)
    )
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    loader = DataLoader(TensorDataset(images, labels), batch_size=64, shuffle=True)
    net, optimizer, loader = accelerator.prepare(model, optimizer, loader)
    steps = Steps()
    accelerator.register_for_checkpointing(steps)
    if any(pathlib.Path(folder, "checkpoints").glob("checkpoint_*")):
        accelerator.load_state()
    began = steps.done
    for _ in range(loader.epoch, EPOCHS):
        for x, y in loader:
            accelerator.backward(torch.nn.functional.cross_entropy(net(x), y))
            optimizer.step()
            optimizer.zero_grad()
            steps.done += 1
            if steps.done % SAVE_EVERY == 0:
                accelerator.save_state()
            time.sleep(step_s)
    return began, int(os.environ["TORCHELASTIC_RESTART_COUNT"]), accelerator.get_state_dict(net)
