import torch
from peft import LoraConfig, TaskType, get_peft_model
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


images, labels = load_digits(return_X_y=True)
config = BertConfig(
    vocab_size=17, hidden_size=16, num_hidden_layers=1, num_attention_heads=2, intermediate_size=32, num_labels=10
)
lora = LoraConfig(task_type=TaskType.SEQ_CLS, r=4, lora_alpha=8, lora_dropout=0.1, target_modules=["query", "value"])
model = get_peft_model(BertForSequenceClassification(config), lora)
arguments = TrainingArguments(
    output_dir=folder,
    num_train_epochs=epochs,
    per_device_train_batch_size=16,
    save_strategy="epoch",
    logging_steps=2,
    report_to="none",
)
trainer = Trainer(model=model, args=arguments, train_dataset=Digits(images[:256], labels[:256]))
trainer.train(resume_from_checkpoint=resume)
