import ignite.distributed as idist
import torch
from ignite.contrib.handlers import ProgressBar
from ignite.engine import Events, create_supervised_evaluator, create_supervised_trainer
from ignite.metrics import Accuracy, Loss
from sklearn.datasets import load_digits
from torch.utils.data import Dataset


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


idist.initialize("gloo")
images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
training = idist.auto_dataloader(Digits(images[:256], labels[:256]), batch_size=32, shuffle=True)
validation = idist.auto_dataloader(Digits(images[256:512], labels[256:512]), batch_size=32)
model = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))
net = idist.auto_model(model)
optimizer = idist.auto_optim(torch.optim.Adam(model.parameters(), lr=0.01))
criterion = torch.nn.CrossEntropyLoss()
trainer = create_supervised_trainer(net, optimizer, criterion, device="cpu")
evaluator = create_supervised_evaluator(net, {"accuracy": Accuracy(), "loss": Loss(criterion)}, device="cpu")
ProgressBar().attach(trainer, output_transform=lambda loss: {"loss": loss})


@trainer.on(Events.EPOCH_COMPLETED)
def validate(engine):
    evaluator.run(validation)


trainer.run(training, max_epochs=epochs)
if idist.get_rank() == 0:
    torch.save(model.state_dict(), f"{folder}/digits.pt")
