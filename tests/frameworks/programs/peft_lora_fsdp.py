import torch
from peft import LoraConfig, TaskType, get_peft_model
from torch.utils.data import DataLoader, Dataset
from transformers import LlamaConfig, LlamaForCausalLM

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


accelerator = Accelerator(fsdp_plugin=FullyShardedDataParallelPlugin(fsdp_version=2))
set_seed(0)
config = LlamaConfig(
    vocab_size=32, hidden_size=16, intermediate_size=32, num_hidden_layers=2, num_attention_heads=2
)  # fmt: skip
lora = LoraConfig(task_type=TaskType.CAUSAL_LM, r=4, lora_alpha=8, target_modules=["q_proj", "v_proj"])
model = get_peft_model(LlamaForCausalLM(config), lora)
optimizer = torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=0.01)
training = DataLoader(Counting(256), batch_size=8, shuffle=True)
model, optimizer, training = accelerator.prepare(model, optimizer, training)

starting_epoch = 0
if resume:
    accelerator.load_state(resume)
    starting_epoch = int(resume.split("_")[-1]) + 1

for epoch in range(starting_epoch, epochs):
    for batch in training:
        loss = model(**batch).loss
        accelerator.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    accelerator.save_state(f"{folder}/epoch_{epoch}")

accelerator.unwrap_model(model).save_pretrained(
    f"{folder}/adapter",
    is_main_process=accelerator.is_main_process,
    state_dict=accelerator.get_state_dict(model),
)
accelerator.wait_for_everyone()
