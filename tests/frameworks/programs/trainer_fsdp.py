import numpy as np
import torch
from sklearn.datasets import load_digits
from torch.utils.data import Dataset
from transformers import BertConfig, BertForSequenceClassification, Trainer, TrainingArguments


class Digits(Dataset):
    def __init__(self, images, labels):
        self.images, self.labels = images.astype(int), labels

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"input_ids": torch.tensor(self.images[index]), "labels": int(self.labels[index])}


def compute_metrics(predictions):
    return {"accuracy": (np.argmax(predictions.predictions, axis=-1) == predictions.label_ids).mean()}


images, labels = load_digits(return_X_y=True)
config = BertConfig(
    vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=10
)
model = BertForSequenceClassification(config)
arguments = TrainingArguments(
    output_dir=folder,
    fsdp="full_shard",
    fsdp_config={"fsdp_version": 2, "auto_wrap_policy": "TRANSFORMER_BASED_WRAP"},
    num_train_epochs=epochs,
    per_device_train_batch_size=16,
    per_device_eval_batch_size=16,
    eval_strategy="epoch",
    save_strategy="epoch",
    logging_steps=2,
    report_to="none",
)
trainer = Trainer(
    model=model,
    args=arguments,
    train_dataset=Digits(images[:256], labels[:256]),
    eval_dataset=Digits(images[256:512], labels[256:512]),
    compute_metrics=compute_metrics,
)
trainer.train(resume_from_checkpoint=resume)
