import torch
import torch.nn.functional as F
from accelerate import Accelerator
from diffusers import DDPMPipeline, DDPMScheduler, UNet2DModel
from diffusers.optimization import get_cosine_schedule_with_warmup
from sklearn.datasets import load_digits
from torch.utils.data import DataLoader, Dataset
from tqdm.auto import tqdm


class Digits(Dataset):
    def __init__(self, images):
        self.images = torch.tensor(images / 8 - 1, dtype=torch.float32)

    def __len__(self):
        return len(self.images)

    def __getitem__(self, index):
        return {"images": self.images[index].view(1, 8, 8)}


model = UNet2DModel(
    sample_size=8,
    in_channels=1,
    out_channels=1,
    layers_per_block=1,
    block_out_channels=(8, 16),
    norm_num_groups=4,
    down_block_types=("DownBlock2D", "AttnDownBlock2D"),
    up_block_types=("AttnUpBlock2D", "UpBlock2D"),
)
noise_scheduler = DDPMScheduler(num_train_timesteps=100)
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
train_dataloader = DataLoader(Digits(load_digits().data[:64]), batch_size=8, shuffle=True)
lr_scheduler = get_cosine_schedule_with_warmup(optimizer, 2, len(train_dataloader) * epochs)

accelerator = Accelerator(cpu=True, gradient_accumulation_steps=1)
model, optimizer, train_dataloader, lr_scheduler = accelerator.prepare(model, optimizer, train_dataloader, lr_scheduler)
for epoch in range(epochs):
    progress_bar = tqdm(total=len(train_dataloader), disable=not accelerator.is_local_main_process)
    progress_bar.set_description(f"Epoch {epoch}")
    for batch in train_dataloader:
        clean_images = batch["images"]
        noise = torch.randn_like(clean_images)
        timesteps = torch.randint(0, 100, (len(clean_images),), dtype=torch.int64)
        noisy_images = noise_scheduler.add_noise(clean_images, noise, timesteps)
        with accelerator.accumulate(model):
            noise_pred = model(noisy_images, timesteps, return_dict=False)[0]
            loss = F.mse_loss(noise_pred, noise)
            accelerator.backward(loss)
            accelerator.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            lr_scheduler.step()
            optimizer.zero_grad()
        progress_bar.update(1)
        progress_bar.set_postfix(loss=loss.detach().item(), lr=lr_scheduler.get_last_lr()[0])
model = accelerator.unwrap_model(model)
if accelerator.is_main_process:
    DDPMPipeline(unet=model, scheduler=noise_scheduler).save_pretrained(folder)
