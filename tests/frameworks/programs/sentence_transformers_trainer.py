from datasets import Dataset
from sentence_transformers import (
    SentenceTransformer,
    SentenceTransformerTrainer,
    SentenceTransformerTrainingArguments,
)
from sentence_transformers.losses import MultipleNegativesRankingLoss
from sentence_transformers.models import StaticEmbedding
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import TrainerCallback

words = ["<unk>", "one", "two", "three", "four", "cat", "dog", "bird", "fish"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
model = SentenceTransformer(modules=[StaticEmbedding(tokenizer, embedding_dim=16)], device="cpu")
pairs = Dataset.from_dict({"anchor": words[1:5] * 16, "positive": words[5:9] * 16})


class Watcher(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.steps = state.global_step


trainer = SentenceTransformerTrainer(
    model=model,
    args=SentenceTransformerTrainingArguments(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        save_strategy="epoch",
        logging_steps=2,
        report_to="none",
    ),
    train_dataset=pairs,
    loss=MultipleNegativesRankingLoss(model),
    callbacks=[Watcher()],
)
trainer.train(resume_from_checkpoint=resume)
