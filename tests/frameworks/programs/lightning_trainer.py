import lightning as L
import torch
from lightning.pytorch.callbacks import ModelCheckpoint
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images, labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return self.images[index], self.labels[index]


class Classifier(L.LightningModule):
    def __init__(self):
        super().__init__()
        self.layers = torch.nn.Sequential(torch.nn.Linear(64, 32), torch.nn.ReLU(), torch.nn.Linear(32, 10))

    def forward(self, images):
        return self.layers(images)

    def training_step(self, batch, batch_idx):
        images, labels = batch
        loss = torch.nn.functional.cross_entropy(self(images), labels)
        self.log("train_loss", loss, prog_bar=True)
        return loss

    def validation_step(self, batch, batch_idx):
        images, labels = batch
        self.log("val_loss", torch.nn.functional.cross_entropy(self(images), labels), prog_bar=True, sync_dist=True)

    def configure_optimizers(self):
        return torch.optim.Adam(self.parameters(), lr=0.01)


images, labels = load_digits(return_X_y=True)
images, labels = torch.tensor(images / 16, dtype=torch.float32), torch.tensor(labels)
model = Classifier()
trainer = L.Trainer(
    max_epochs=epochs,
    accelerator="cpu",
    devices=2,
    default_root_dir=folder,
    callbacks=[ModelCheckpoint(dirpath=folder, filename="{epoch}", save_top_k=-1)],
)
trainer.fit(
    model,
    DataLoader(Digits(images[:256], labels[:256]), batch_size=16, shuffle=True),
    DataLoader(Digits(images[256:512], labels[256:512]), batch_size=16),
    ckpt_path=resume,
)
