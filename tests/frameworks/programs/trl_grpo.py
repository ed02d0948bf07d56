from datasets import Dataset
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
from trl import GRPOConfig, GRPOTrainer

words = ["<unk>", "<pad>", "<eos>", "one", "two", "three", "four", "and", "more"]
tokenizer = Tokenizer(models.WordLevel({word: number for number, word in enumerate(words)}, unk_token="<unk>"))
tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizer, pad_token="<pad>", eos_token="<eos>")

config = LlamaConfig(
    vocab_size=len(words), hidden_size=16, intermediate_size=32, num_hidden_layers=1, num_attention_heads=2
)
model = LlamaForCausalLM(config)


def reward_more(completions, **kwargs):
    return [float(completion.count("more")) for completion in completions]


trainer = GRPOTrainer(
    model=model,
    reward_funcs=reward_more,
    args=GRPOConfig(
        output_dir=folder,
        num_train_epochs=epochs,
        per_device_train_batch_size=4,
        num_generations=4,
        max_completion_length=8,
        save_strategy="epoch",
        logging_steps=1,
        use_cpu=True,
        bf16=False,
        report_to="none",
    ),
    train_dataset=Dataset.from_dict({"prompt": ["one two", "three four"] * 4}),
    processing_class=tokenizer,
)
trainer.train(resume_from_checkpoint=resume)
