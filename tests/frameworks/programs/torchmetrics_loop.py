import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler
from torchmetrics.classification import MulticlassAccuracy


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
training, validation = Digits(images[:256], labels[:256]), Digits(images[256:512], labels[256:512])
sampler = DistributedSampler(training)
training = DataLoader(training, batch_size=16, sampler=sampler)
validation = DataLoader(validation, batch_size=16, sampler=DistributedSampler(validation, shuffle=False))
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
metric = MulticlassAccuracy(num_classes=10)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    net.train()
    for inputs, targets in training:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
    net.eval()
    with torch.no_grad():
        for inputs, targets in validation:
            metric.update(net(inputs), targets)
    accuracy = metric.compute()  # over the samples of all ranks
    metric.reset()
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), f"{folder}/digits.pt")
