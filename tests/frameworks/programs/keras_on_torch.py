import os

os.environ["KERAS_BACKEND"] = "torch"

import keras
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


torch.distributed.init_process_group("gloo")
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
dataset = Digits(images[:256], labels[:256])
model = keras.Sequential([keras.Input((64,)), keras.layers.Dense(32, activation="relu"), keras.layers.Dense(10)])
ddp_model = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
sampler = DistributedSampler(dataset)
dataloader = DataLoader(dataset, batch_size=16, sampler=sampler)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in dataloader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(ddp_model(inputs), targets)
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    model.save(f"{folder}/digits.keras")
