"""File names of weights, as in ``accelerate.utils.constants``."""

MODEL_NAME = "pytorch_model"
OPTIMIZER_NAME = "optimizer"
SAFE_MODEL_NAME = "model"
SCHEDULER_NAME = "scheduler"
WEIGHTS_NAME = f"{MODEL_NAME}.bin"
WEIGHTS_INDEX_NAME = f"{WEIGHTS_NAME}.index.json"
WEIGHTS_PATTERN_NAME = f"{MODEL_NAME}{{suffix}}.bin"
SAFE_WEIGHTS_NAME = f"{SAFE_MODEL_NAME}.safetensors"
SAFE_WEIGHTS_INDEX_NAME = f"{SAFE_WEIGHTS_NAME}.index.json"
SAFE_WEIGHTS_PATTERN_NAME = f"{SAFE_MODEL_NAME}{{suffix}}.safetensors"

__all__ = [name for name in dir() if name.isupper()]
