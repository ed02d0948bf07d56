"""The table of programs, one row each. A new library is a new row and its program in ``programs/``."""

from __future__ import annotations

import dataclasses
import pathlib
import re
import textwrap
from collections.abc import Mapping

_PROGRAMS = pathlib.Path(__file__).parent / "programs"

CHECKS: Mapping[str, str] = {
    "trains": "trains in a cell and with `notebook_launcher`, and both ranks end with the same model",
    "again": "runs again in the same notebook, also after a failure and after an interrupt",
    "session": "trains twice in a session, with a failure in between, and again after an interrupt",
    "progress": "the panel's rows show step, total, rate and loss, and evaluation apart from training",
    "error": "an exception in the user's code is raised in the cell, with the user's lines",
    "interrupt": "an interrupt leaves no process; a program that can resume does so from its checkpoint",
    "returns": "`--pull` brings its model back, and the library itself loads a saved one",
    "numbers": "ends with the same weights as with Accelerate's `notebook_launcher`, bit for bit",
}
"""What is checked of each row, by the names of the tests."""


@dataclasses.dataclass(frozen=True)
class Row:
    """A program as its library's documentation writes it.

    It reads the notebook's variables ``epochs``, ``folder`` and ``resume``, and ends with a variable ``model``.

    Attributes:
        name: Its name in the table.
        program: The name of its file.
        packages: The distributions whose versions the table gives.
        preload: Modules that ranks find imported, since importing takes longer than training.
        world_size: An expression for the library's own number of ranks.
        users_line: A line of the user's own code that runs often, in a callback or a ``__getitem__``.
        pause_s: Seconds that each of its calls takes while progress is looked at.
        has_total: Whether the number of steps is known.
        evaluation: The label, or the metric, that shows that it evaluates; empty if it doesn't.
        checkpoints: A pattern of the checkpoints from which it resumes; empty if it doesn't.
        load: An expression that loads the model from ``folder`` in the notebook; empty if the program doesn't save it.
        cannot_train: The reason why it can't train here, and a text that is in its traceback; ``None`` if it can.
        fails: The checks that fail, with the reason.
    """

    name: str
    program: str
    packages: tuple[str, ...]
    preload: tuple[str, ...]
    world_size: str = "torch.distributed.get_world_size()"
    users_line: str = "return self.images[index], self.labels[index]"
    pause_s: float = 0.01
    has_total: bool = True
    evaluation: str = ""
    checkpoints: str = ""
    load: str = ""
    cannot_train: tuple[str, str] | None = None
    fails: Mapping[str, str] = dataclasses.field(default_factory=dict)

    @property
    def source(self) -> str:
        """The program."""
        return (_PROGRAMS / f"{self.program}.py").read_text(encoding="utf-8")

    def cell(self, before_users_line: str, last: str) -> str:
        """Return the program as a cell.

        Args:
            before_users_line: A statement that is put before the user's line, for the test.
            last: The cell's last expression.
        """
        pattern = rf"^( *){re.escape(self.users_line)}"
        source, count = re.subn(
            pattern,
            lambda found: f"{found[1]}{before_users_line}\n{found[0]}",
            self.source,
            count=1,
            flags=re.MULTILINE,
        )
        assert count == 1, f"{self.program}.py has no line {self.users_line!r}"
        return f"{source}\n{last}\n"

    def function(self, before_users_line: str, last: str) -> str:
        """Return the same as a function ``train``."""
        return f"def train():\n{textwrap.indent(self.cell(before_users_line, f'return {last}'), '    ')}"


TRAINER = "transformers.trainer"
_WATCHER = "self.steps = state.global_step"
_TOKENS = 'return {"input_ids": tokens'
_STATE_DICT = "model.load_state_dict(torch.load(f'{folder}/digits.pt')) and model"

ROWS = [
    Row(
        "PyTorch DistributedDataParallel with torchmetrics",
        "torchmetrics_loop",
        ("torch", "torchmetrics"),
        ("torchmetrics.classification", "sklearn.datasets"),
        evaluation="evaluation",
        load=_STATE_DICT,
    ),
    Row(
        "Accelerate",
        "accelerate_loop",
        ("accelerate",),
        ("accelerate", "sklearn.datasets"),
        world_size="accelerator.num_processes",
        evaluation="evaluation",
        checkpoints="epoch_*",
        load="__import__('safetensors.torch').torch.load_model(model, f'{folder}/epoch_0/model.safetensors') and model",
    ),
    Row(
        "Transformers `Trainer`",
        "transformers_trainer",
        ("transformers",),
        (TRAINER, "sklearn.datasets"),
        world_size="trainer.args.world_size",
        users_line='return {"input_ids"',
        evaluation="eval_loss",
        checkpoints="checkpoint-*",
        load="__import__('transformers').BertForSequenceClassification.from_pretrained(f'{folder}/checkpoint-8')",
    ),
    Row(
        "PEFT: LoRA in a `Trainer`",
        "peft_lora",
        ("peft", "transformers"),
        (TRAINER, "peft", "sklearn.datasets"),
        world_size="trainer.args.world_size",
        users_line='return {"input_ids"',
        checkpoints="checkpoint-*",
    ),
    Row(
        "Transformers: a causal LM, sharded by our `Accelerator`",
        "causal_lm_fsdp",
        ("transformers",),
        ("transformers.models.llama.modeling_llama",),
        world_size="accelerator.num_processes",
        users_line=_TOKENS,
        evaluation="evaluation",
        checkpoints="epoch_*",
        load="__import__('transformers').LlamaForCausalLM.from_pretrained(f'{folder}/model')",
    ),
    Row(
        "PEFT: LoRA of a causal LM, sharded by our `Accelerator`",
        "peft_lora_fsdp",
        ("peft", "transformers"),
        ("transformers.models.llama.modeling_llama", "peft"),
        world_size="accelerator.num_processes",
        users_line=_TOKENS,
        checkpoints="epoch_*",
    ),
    Row(
        "TRL `SFTTrainer`",
        "trl_sft",
        ("trl", "transformers", "datasets"),
        (TRAINER, "trl.trainer.sft_trainer"),
        world_size="trainer.args.world_size",
        users_line=_WATCHER,
        pause_s=0.1,
        checkpoints="checkpoint-*",
        load="__import__('transformers').LlamaForCausalLM.from_pretrained(f'{folder}/checkpoint-8')",
    ),
    Row(
        "TRL `DPOTrainer`",
        "trl_dpo",
        ("trl", "transformers", "datasets"),
        (TRAINER, "trl.trainer.dpo_trainer"),
        world_size="trainer.args.world_size",
        users_line=_WATCHER,
        pause_s=0.2,
        checkpoints="checkpoint-*",
        load="__import__('transformers').LlamaForCausalLM.from_pretrained(f'{folder}/checkpoint-4')",
    ),
    Row(
        "TRL `GRPOTrainer` with a reward function",
        "trl_grpo",
        ("trl", "transformers", "datasets"),
        (TRAINER, "trl.trainer.grpo_trainer"),
        world_size="trainer.args.world_size",
        users_line="return [float(completion",
        pause_s=0.2,
        checkpoints="checkpoint-*",
        load="__import__('transformers').LlamaForCausalLM.from_pretrained(f'{folder}/checkpoint-4')",
    ),
    Row(
        "Sentence Transformers",
        "sentence_transformers_trainer",
        ("sentence-transformers", "transformers"),
        (TRAINER, "sentence_transformers"),
        world_size="trainer.args.world_size",
        users_line=_WATCHER,
        pause_s=0.1,
        checkpoints="checkpoint-*",
        load="__import__('sentence_transformers').SentenceTransformer(f'{folder}/checkpoint-8', device='cpu')",
    ),
    Row(
        "Diffusers: unconditional generation",
        "diffusers_unconditional",
        ("diffusers", "accelerate"),
        ("diffusers.pipelines.ddpm", "diffusers.models.unets.unet_2d", "sklearn.datasets"),
        world_size="accelerator.num_processes",
        users_line='return {"images"',
        load="__import__('diffusers').DDPMPipeline.from_pretrained(folder).unet",
    ),
    Row(
        "Lightning `Trainer`",
        "lightning_trainer",
        ("lightning",),
        ("lightning", "lightning.pytorch.callbacks", "sklearn.datasets"),
        world_size="trainer.world_size",
        evaluation="Validation",
        checkpoints="epoch=*.ckpt",
        load="type(model).load_from_checkpoint(f'{folder}/epoch=0.ckpt')",
    ),
    Row(
        "Lightning Fabric",
        "lightning_fabric",
        ("lightning",),
        ("lightning", "sklearn.datasets"),
        world_size="fabric.world_size",
        checkpoints="epoch_*.ckpt",
        load="model.load_state_dict(torch.load(f'{folder}/epoch_0.ckpt')['model']) and model",
    ),
    Row(
        "fastai: its own `distrib_ctx`",
        "fastai_distrib_ctx",
        ("fastai",),
        ("fastai.learner", "fastai.distributed", "sklearn.datasets"),
        cannot_train=("it chooses a CUDA device and sends indices through CUDA, also on a CPU", "in setup_distrib"),
    ),
    Row(
        "fastai: `Learner` with a model in DistributedDataParallel",
        "fastai_learner",
        ("fastai",),
        ("fastai.learner", "sklearn.datasets"),
    ),
    Row(
        "Keras 3 on torch",
        "keras_on_torch",
        ("keras",),
        ("keras", "sklearn.datasets"),
        load="__import__('keras').saving.load_model(f'{folder}/digits.keras')",
    ),
    Row(
        "PyTorch-Ignite",
        "ignite_engine",
        ("pytorch-ignite",),
        ("ignite.engine", "ignite.distributed", "sklearn.datasets"),
        world_size="idist.get_world_size()",
        evaluation="evaluation",
        load=_STATE_DICT,
    ),
    Row(
        "timm",
        "timm_model",
        ("timm",),
        ("timm.optim", "sklearn.datasets"),
        users_line="return torch.nn.functional.interpolate",
        load=_STATE_DICT,
    ),
    Row(
        "Datasets: a stream, split by rank",
        "datasets_stream",
        ("datasets",),
        ("datasets.distributed", "sklearn.datasets"),
        users_line='return {"image"',
        has_total=False,
        load=_STATE_DICT,
    ),
]

PRELOAD = tuple(dict.fromkeys(module for row in ROWS for module in row.preload))
"""The modules of all rows: one template has them all."""
