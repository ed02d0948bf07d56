import torch
from accelerate import Accelerator
from accelerate.utils import set_seed
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

accelerator = Accelerator(cpu=True)
set_seed(0)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
training = DataLoader(Digits(images[:256], labels[:256]), batch_size=16, shuffle=True)
validation = DataLoader(Digits(images[256:512], labels[256:512]), batch_size=16)
model, optimizer, training, validation = accelerator.prepare(model, optimizer, training, validation)

starting_epoch = 0
if resume:
    accelerator.load_state(resume)
    starting_epoch = int(resume.split("_")[-1]) + 1

for epoch in range(starting_epoch, epochs):
    model.train()
    for inputs, targets in training:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(model(inputs), targets)
        accelerator.backward(loss)
        optimizer.step()
    model.eval()
    correct = 0
    for inputs, targets in validation:
        with torch.no_grad():
            predictions = model(inputs).argmax(dim=-1)
        predictions, targets = accelerator.gather_for_metrics((predictions, targets))
        correct += (predictions == targets).sum().item()
    accelerator.print(f"epoch {epoch}: accuracy {correct / 256:.2f}")
    accelerator.save_state(f"{folder}/epoch_{epoch}")

model = accelerator.unwrap_model(model)
