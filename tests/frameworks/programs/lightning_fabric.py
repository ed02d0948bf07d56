import lightning as L
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)

fabric = L.Fabric(accelerator="cpu", devices=2, strategy="ddp")
fabric.launch()
fabric.seed_everything(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
model, optimizer = fabric.setup(model, optimizer)
dataloader = fabric.setup_dataloaders(DataLoader(Digits(images[:256], labels[:256]), batch_size=16, shuffle=True))
state = {"model": model, "optimizer": optimizer, "epoch": 0}
if resume:
    fabric.load(resume, state)
for epoch in range(state["epoch"], epochs):
    for inputs, targets in dataloader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        fabric.backward(loss)
        optimizer.step()
    state["epoch"] = epoch + 1
    fabric.save(f"{folder}/epoch_{epoch}.ckpt", state)
model = model.module
