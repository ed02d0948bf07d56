import torch
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM, get_linear_schedule_with_warmup

from notebook_accel import Accelerator, FullyShardedDataParallelPlugin
from notebook_accel.utils import set_seed


class Counting(Dataset):
    def __init__(self, samples):
        self.starts = torch.randint(0, 20, (samples,), generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.starts)

    def __getitem__(self, index):
        tokens = (self.starts[index] + torch.arange(12)) % 32
        return {"input_ids": tokens, "labels": tokens}


accelerator = Accelerator(
    gradient_accumulation_steps=2,
    fsdp_plugin=FullyShardedDataParallelPlugin(
        fsdp_version=2, auto_wrap_policy="transformer_based_wrap", reshard_after_forward=True
    ),
)
set_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2,
    tie_word_embeddings=True,
)  # fmt: skip
model = LlamaForCausalLM(config)
optimizer = torch.optim.AdamW(model.parameters(), lr=0.01)
training = DataLoader(Counting(256), batch_size=8, shuffle=True)
validation = DataLoader(Counting(64), batch_size=8)
schedule = get_linear_schedule_with_warmup(optimizer, 4, 1000)
model, optimizer, training, validation, schedule = accelerator.prepare(model, optimizer, training, validation, schedule)

starting_epoch = 0
if resume:
    accelerator.load_state(resume)
    starting_epoch = int(resume.split("_")[-1]) + 1

for epoch in range(starting_epoch, epochs):
    model.train()
    for batch in training:
        with accelerator.accumulate(model):
            loss = model(**batch).loss
            accelerator.backward(loss)
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            schedule.step()
            optimizer.zero_grad()
    model.eval()
    losses = []
    with torch.no_grad():
        for batch in validation:
            losses.append(accelerator.gather_for_metrics(model(**batch).loss.repeat(8)))
    accelerator.print(f"epoch {epoch}: perplexity {torch.cat(losses).mean().exp():.2f}")
    accelerator.save_state(f"{folder}/epoch_{epoch}")

accelerator.wait_for_everyone()
accelerator.unwrap_model(model).save_pretrained(
    f"{folder}/model",
    is_main_process=accelerator.is_main_process,
    save_function=accelerator.save,
    state_dict=accelerator.get_state_dict(model),
)
accelerator.wait_for_everyone()
