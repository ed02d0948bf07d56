from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast, TrainerCallback
from trl import SFTConfig, SFTTrainer

words = ["<unk>", "<pad>", "<eos>", "one", "two", "three", "four", "and", "more"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")

config = LlamaConfig(
    vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = LlamaForCausalLM(config)


class Watcher(TrainerCallback):
    def on_step_end(self, args, state, control, **kwargs):
        self.steps = state.global_step


trainer = SFTTrainer(
    model=model,
    args=SFTConfig(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        save_strategy="epoch",
        logging_steps=2,
        use_cpu=True,
        bf16=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"text": ["one two three", "three and four and more"] * 32}),
    processing_class=tokenizer,
    callbacks=[Watcher()],
)
trainer.train(resume_from_checkpoint=resume)
