import timm.optim
import torch
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset, DistributedSampler


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        image = self.images[index].view(1, 1, 8, 8)
        return torch.nn.functional.interpolate(image, size=32)[0], self.labels[index]


torch.distributed.init_process_group("gloo")
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
dataset = Digits(images[:128], labels[:128])
model = timm.create_model("test_resnet", pretrained=False, num_classes=10, in_chans=1)
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = timm.optim.create_optimizer_v2(net, opt="adamw", lr=1e-3)
sampler = DistributedSampler(dataset)
loader = DataLoader(dataset, batch_size=16, sampler=sampler)
for epoch in range(epochs):
    sampler.set_epoch(epoch)
    for inputs, targets in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(inputs), targets)
        loss.backward()
        optimizer.step()
if torch.distributed.get_rank() == 0:
    torch.save(model.state_dict(), f"{folder}/digits.pt")
