"""Programs of Transformers' ``Trainer`` and of Lightning with one planted cause of slowness each. Run in ranks.

They run until they are stopped. Nothing of this package is in them. The libraries are imported in the ranks only.
"""

from __future__ import annotations

import os
import pathlib
import time
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812  # as everybody writes it
from torch.utils.data import DataLoader, Dataset, Subset

_SLOW_S = 0.05
_BATCH = 8
_MANY = 1 << 20  # steps; nobody gets there


def line_of(mark: str) -> str:
    """The place of the line with this mark, as a verdict names it."""
    lines = pathlib.Path(__file__).read_text().splitlines()
    number = next(number for number, line in enumerate(lines, 1) if line.endswith(f"# planted: {mark}"))
    return f"{__file__}, line {number}"


class Samples(Dataset[Any]):
    def __init__(self, is_slow: bool = False) -> None:
        self.is_slow = is_slow

    def __len__(self) -> int:
        return 1 << 16

    def __getitem__(self, index: int) -> dict[str, torch.Tensor]:
        if self.is_slow:
            time.sleep(_SLOW_S / _BATCH)  # planted: data
        return {"x": torch.ones(16), "labels": torch.tensor(index % 4)}  # planted: sample


class Model(torch.nn.Module):
    def __init__(self, slow_rank: int | None = None, parameters: int = 0) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(16, 4)
        self.slow_rank = slow_rank
        self.ballast = torch.nn.Parameter(torch.zeros(parameters), requires_grad=False)

    def forward(self, x: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        if int(os.environ["RANK"]) == self.slow_rank:
            time.sleep(_SLOW_S)  # planted: straggler
        logits = self.layer(x)
        return {"loss": F.cross_entropy(logits, labels), "logits": logits}


def _model(cause: str) -> Model:
    return Model(1 if cause == "straggler" else None, 2_000_000 if cause == "checkpoint" else 0)


def with_transformers(cause: str, folder: str) -> None:
    from transformers import Trainer, TrainingArguments

    arguments = TrainingArguments(
        output_dir=folder,
        max_steps=_MANY,
        per_device_train_batch_size=_BATCH,
        per_device_eval_batch_size=256,
        eval_strategy="steps" if cause == "evaluation" else "no",
        eval_steps=1,
        save_strategy="steps" if cause == "checkpoint" else "no",
        save_steps=1,
        save_total_limit=1,
        logging_steps=_MANY,
        report_to="none",
        use_cpu=True,
    )
    held = Subset(Samples(), range(1024))
    trainer = Trainer(
        model=_model(cause), args=arguments, train_dataset=Samples(is_slow=cause == "data"), eval_dataset=held
    )
    trainer.train()  # planted: transformers


def with_lightning(cause: str, folder: str) -> None:
    import lightning
    from lightning.pytorch.callbacks import ModelCheckpoint

    class Module(lightning.LightningModule):
        def __init__(self, model: Model) -> None:
            super().__init__()
            self.model = model

        def training_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> torch.Tensor:
            return self.model(**batch)["loss"]

        def validation_step(self, batch: dict[str, torch.Tensor], batch_idx: int) -> None:
            self.model(**batch)

        def configure_optimizers(self) -> torch.optim.Optimizer:
            return torch.optim.SGD(self.parameters(), lr=0.01)

    saves = ModelCheckpoint(dirpath=folder, every_n_train_steps=1)
    trainer = lightning.Trainer(
        max_steps=_MANY,
        accelerator="cpu",
        devices=2,
        default_root_dir=folder,
        logger=False,
        enable_checkpointing=cause == "checkpoint",
        callbacks=[saves] if cause == "checkpoint" else [],
        val_check_interval=1 if cause == "evaluation" else None,
        limit_val_batches=4 if cause == "evaluation" else 0,
        num_sanity_val_steps=0,
    )
    loader = DataLoader(Samples(is_slow=cause == "data"), batch_size=_BATCH)
    trainer.fit(Module(_model(cause)), loader, DataLoader(Samples(), batch_size=256))  # planted: lightning
