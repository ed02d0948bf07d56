import fastai.distributed
import torch
from fastai.data.core import DataLoaders
from fastai.learner import Learner
from fastai.metrics import accuracy
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
dls = DataLoaders.from_dsets(Digits(images[:256], labels[:256]), Digits(images[256:512], labels[256:512]), bs=16)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
learn = Learner(dls, model, loss_func=torch.nn.CrossEntropyLoss(), metrics=accuracy, path=folder)
with learn.distrib_ctx(sync_bn=False, in_notebook=True):
    learn.fit(epochs, 0.01)
learn.save("digits")
