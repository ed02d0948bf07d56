import torch
from fastai.data.core import DataLoaders
from fastai.learner import Callback, Learner
from fastai.metrics import accuracy
from sklearn.datasets import load_digits
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import Dataset


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


torch.distributed.init_process_group("gloo")
rank, ranks = torch.distributed.get_rank(), torch.distributed.get_world_size()
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
dls = DataLoaders.from_dsets(
    Digits(images[:256][rank::ranks], labels[:256][rank::ranks]),
    Digits(images[256:512][rank::ranks], labels[256:512][rank::ranks]),
    bs=16,
    device=torch.device("cpu"),
)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
learn = Learner(
    dls, DistributedDataParallel(model), loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy, path=folder
)
learn.fit(epochs, 0.01)
if rank == 0:
    learn.save("digits")
