"""Notebooks as people paste them: with the helpers, classes and imports that competitions and courses have."""

from __future__ import annotations

from collections.abc import Callable

from tests import kernels

Run = Callable[[str], kernels.Outcome]

IMPORTS = """
import os, random, warnings
from dataclasses import dataclass, field
from enum import Enum
from os import environ
from pathlib import Path
import numpy as np
import torch, torch.nn as nn, torch.nn.functional as F
from PIL import Image
from sklearn.datasets import load_digits
from sklearn.model_selection import StratifiedKFold
from torch.utils.data import Dataset, DataLoader
from tqdm.auto import tqdm
"""

HELPERS = """
class CFG:
    seed = 42; epochs = 3; lr = 3e-3; batch_size = 32; folds = 5; workers = 2; deterministic = True

def seed_everything(seed):
    random.seed(seed)
    os.environ["PYTHONHASHSEED"] = str(seed)
    np.random.seed(seed)
    torch.manual_seed(seed)
    torch.cuda.manual_seed_all(seed)
    torch.backends.cudnn.deterministic = CFG.deterministic
    torch.backends.cudnn.benchmark = False

seed_everything(CFG.seed)
"""

IMAGES = """
digits, root = load_digits(), Path("images")
for number in range(500):
    folder = root / str(digits.target[number])
    folder.mkdir(parents=True, exist_ok=True)
    Image.fromarray((digits.images[number] * 15).astype("uint8")).save(folder / f"{number}.png")
files = sorted(root.glob("*/*.png"))
labels = [int(file.parent.name) for file in files]
splits = StratifiedKFold(CFG.folds, shuffle=True, random_state=CFG.seed).split(files, labels)
train_index, valid_index = next(splits)
"""

CLASSES = """
class Phase(Enum):
    TRAIN = ("train", True)
    VALID = ("valid", False)
    def __init__(self, label, augments): self.label, self.augments = label, augments

@dataclass
class Augment:
    noise: float = 0.05
    ops: list = field(default_factory=lambda: ["noise"])
    def __call__(self, image): return image + self.noise * random.random() * torch.randn_like(image)

class DigitsDataset(Dataset):
    def __init__(self, files, phase, transform=None):
        self.files, self.phase, self.transform = files, phase, transform
        self.classes = sorted({file.parent.name for file in files})
    def __len__(self): return len(self.files)
    def __getitem__(self, index):
        image = torch.tensor(np.array(Image.open(self.files[index])), dtype=torch.float32)[None] / 255
        if self.transform is not None and self.phase.augments: image = self.transform(image)
        return image, torch.tensor(int(self.files[index].parent.name))

class Net(nn.Module):
    def __init__(self, classes):
        super().__init__()
        self.ops = nn.Sequential(nn.Conv2d(1, 16, 3), nn.ReLU(), nn.Flatten(), nn.Linear(16 * 36, classes))
    def forward(self, images): return self.ops(images)

class Trainer:
    def __init__(self, model, optimizer, config, accelerator):
        self.model, self.optimizer, self.config, self.accelerator = model, optimizer, config, accelerator
        self.history = []
    def fit(self, train, valid):
        for epoch in range(self.config.epochs):
            self.model.train()
            for images, targets in tqdm(train, desc=f"epoch {epoch}"):
                loss = F.cross_entropy(self.model(images), targets)
                self.accelerator.backward(loss)
                self.optimizer.step()
                self.optimizer.zero_grad()
            self.history.append(self.validate(valid))
    @torch.no_grad()
    def validate(self, valid):
        self.model.eval()
        hits = []
        for images, targets in valid:
            found, targets = self.accelerator.gather_for_metrics((self.model(images).argmax(1), targets))
            hits.append((found == targets).float())
        return torch.cat(hits).mean().item()

dataset = DigitsDataset([files[index] for index in train_index], Phase.TRAIN, Augment())
held_out = DigitsDataset([files[index] for index in valid_index], Phase.VALID)
"""

TRAINING = """%%distributed -n 2 --pull net,history
from notebook_accel import Accelerator
seed_everything(CFG.seed)
accelerator = Accelerator()
net = Net(len(dataset.classes))
optimizer = torch.optim.AdamW(net.parameters(), lr=CFG.lr)
train_loader = DataLoader(dataset, CFG.batch_size, shuffle=True, num_workers=CFG.workers, drop_last=True)
valid_loader = DataLoader(held_out, CFG.batch_size * 2, num_workers=CFG.workers)
net, optimizer, train_loader, valid_loader = accelerator.prepare(net, optimizer, train_loader, valid_loader)
trainer = Trainer(net, optimizer, CFG, accelerator)
trainer.fit(train_loader, valid_loader)
history = trainer.history
environ["RANK"], environ["WORLD_SIZE"], history
"""

CHECK = """
net.eval()
with torch.no_grad():
    found = torch.stack([net(image[None]).argmax(1)[0] for image, _ in held_out])
accuracy = (found == torch.stack([target for _, target in held_out])).float().mean().item()
type(net) is Net, len(history), abs(accuracy - history[-1]) < 1e-6, accuracy > 0.8
"""


def test_competition_notebook_runs_as_it_is_pasted_and_brings_its_model_back(run: Run) -> None:
    for cell in (IMPORTS, HELPERS, IMAGES, CLASSES):
        outcome = run(cell)
        assert outcome.status == "ok", outcome.traceback
    outcome = run(TRAINING)
    assert outcome.status == "ok", outcome.traceback
    (first, world, history), (second, _, same) = eval(outcome.result)
    assert (first, second, world) == ("0", "1", "2")
    assert history == same
    checked = run(CHECK)
    assert checked.result == "(True, 3, True, True)", checked.traceback or checked.result


def test_source_of_earlier_cells_is_there_in_the_ranks(run: Run) -> None:
    assert (
        run("def double(x: torch.Tensor):\n    return x * 2\ndef fails():\n    raise KeyError('here')").status == "ok"
    )
    script = run(
        "%%distributed -n 2\nimport inspect\ntorch.jit.script(double)(torch.ones(1)).item(), inspect.getsource(double)"
    )
    assert script.status == "ok", script.traceback
    assert eval(script.result) == [(2.0, "def double(x: torch.Tensor):\n    return x * 2\n")] * 2
    failure = run("%%distributed -n 2\nfails()")
    assert "raise KeyError('here')" in failure.traceback


def test_seed_that_was_imported_by_name_counts(run: Run) -> None:
    assert run("from random import random, seed").status == "ok"
    drawn = run("""%%distributed -n 2
seed(3)
layer = torch.nn.Linear(1, 1)
torch.optim.SGD(layer.parameters()).step()
random()""")
    assert drawn.status == "ok", drawn.traceback
    assert len(set(eval(drawn.result))) == 1
