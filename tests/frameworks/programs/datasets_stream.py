import torch
from datasets import Dataset
from datasets.distributed import split_dataset_by_node
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader


def scale(row):
    return {"image": [value / 16 for value in row["image"]]}


torch.distributed.init_process_group("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
images, labels = load_digits(return_X_y=True)
dataset = Dataset.from_dict({"image": images[:256], "label": labels[:256]}).to_iterable_dataset(num_shards=2)
dataset = split_dataset_by_node(dataset.map(scale).with_format("torch"), rank=rank, world_size=ranks)
loader = DataLoader(dataset, batch_size=16)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
net = torch.nn.parallel.DistributedDataParallel(model)
optimizer = torch.optim.Adam(model.parameters(), lr=0.01)
for epoch in range(epochs):
    dataset.set_epoch(epoch)
    for batch in loader:
        optimizer.zero_grad()
        loss = torch.nn.functional.cross_entropy(net(batch["image"]), batch["label"])
        loss.backward()
        optimizer.step()
if rank == 0:
    torch.save(model.state_dict(), f"{folder}/digits.pt")
