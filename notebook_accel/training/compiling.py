"""Compiles models by ``torch.compile`` when they are prepared, as ``Accelerator(dynamo_backend=...)`` asks for."""

from __future__ import annotations

import dataclasses
import enum
import os
import weakref
from typing import Any, cast

import torch

from notebook_accel import environment
from notebook_accel.errors import ConfigError
from notebook_accel.training.handlers import KwargsHandler


class DynamoBackend(str, enum.Enum):
    """Backends of ``torch.compile``; ``NO`` leaves models as they are. Each member equals its name as text."""

    NO = "NO"
    AOT_EAGER = "AOT_EAGER"
    CUDAGRAPHS = "CUDAGRAPHS"
    EAGER = "EAGER"
    INDUCTOR = "INDUCTOR"
    ONNXRT = "ONNXRT"
    OPENXLA = "OPENXLA"
    TENSORRT = "TENSORRT"
    TVM = "TVM"


@dataclasses.dataclass
class TorchDynamoPlugin(KwargsHandler):
    """Settings of ``torch.compile``, which has the details.

    Settings that aren't given come from environment variables, such as ``ACCELERATE_DYNAMO_BACKEND`` and
    ``ACCELERATE_DYNAMO_MODE``, in which a launch puts its options.

    Attributes:
        backend: A ``DynamoBackend`` or its name, in upper or lower case.
        mode: ``"default"``, ``"reduce-overhead"``, ``"max-autotune"`` or ``"max-autotune-no-cudagraphs"``.
        fullgraph: Raise instead of running a part of the model without compiling it.
        dynamic: Compile for inputs of any shape; ``None`` does so when shapes change.
        options: Options of the backend. They exclude ``mode``.
        disable: Compile nothing.
        use_regional_compilation: Compile each block of a ``ModuleList`` of equal blocks, and the layers outside of
            them, in place, instead of the whole model. The compiler then compiles equal blocks once.

    Raises:
        ConfigError: torch has no such backend, or a variable of the environment isn't a flag.
    """

    backend: Any = None
    mode: str | None = None
    fullgraph: bool | None = None
    dynamic: bool | None = None
    options: Any = None
    disable: bool = False
    use_regional_compilation: bool | None = None

    def __post_init__(self) -> None:
        prefix = environment.DYNAMO
        name = self.backend if self.backend is not None else os.environ.get(f"{prefix}BACKEND") or "no"
        name = str(getattr(name, "value", name)).upper()
        if name not in DynamoBackend.__members__:
            known = ", ".join(repr(backend.value.lower()) for backend in DynamoBackend)
            raise ConfigError(f"dynamo_backend is {name.lower()!r}.", why="torch has no such backend.", fix=known)
        self.backend = DynamoBackend[name]
        self.mode = self.mode or os.environ.get(f"{prefix}MODE") or "default"
        if self.fullgraph is None:
            self.fullgraph = environment.flag(f"{prefix}USE_FULLGRAPH") or False
        if self.dynamic is None:
            # A launch writes False where nothing was asked for.
            self.dynamic = environment.flag(f"{prefix}USE_DYNAMIC") or None
        if self.use_regional_compilation is None:
            self.use_regional_compilation = environment.flag(f"{prefix}USE_REGIONAL_COMPILATION") or False

    def to_dict(self) -> dict[str, Any]:
        """Return all settings by name, the backend in lower case."""
        return {**super().to_dict(), "backend": self.backend.value.lower()}

    def to_kwargs(self) -> dict[str, Any]:
        """Return the arguments of ``torch.compile``, none for the backend ``NO``."""
        if self.backend is DynamoBackend.NO:
            return {}
        defaults = {"mode": "default", "fullgraph": False, "dynamic": None, "options": None, "disable": False}
        changed = {name: getattr(self, name) for name in defaults if getattr(self, name) != defaults[name]}
        return {"backend": self.backend.value.lower(), **changed}


def resolve(backend: Any, plugin: TorchDynamoPlugin | None) -> TorchDynamoPlugin:
    """Return the settings that result from ``dynamo_backend``, ``dynamo_plugin`` and the launch.

    Raises:
        ConfigError: Both were given, or torch has no such backend.
    """
    if backend is not None and plugin is not None:
        raise ConfigError(
            "Accelerator has both dynamo_backend and dynamo_plugin.",
            fix=f"dynamo_plugin=TorchDynamoPlugin(backend={backend!r}, ...)",
        )
    return TorchDynamoPlugin(backend) if plugin is None else dataclasses.replace(plugin)


# The wrappers created here. A model that the user's code has compiled is left as it is.
_compiled_here: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def compiled_from(model: object) -> torch.nn.Module | None:
    """Return the model in a wrapper of ``torch.compile``; ``None`` for any other object."""
    # By name, since importing the wrapper's class is slow.
    modules = getattr(model, "_modules", {})  # a bare tensor has none, and a scripted model's have no ``get``
    return modules["_orig_mod"] if "_orig_mod" in modules else None  # noqa: SIM401


def is_compiled_module(module: torch.nn.Module) -> bool:
    """Return whether a module was made by ``torch.compile``."""
    return compiled_from(module) is not None


def uncompiled(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside ``torch.compile`` wrappers, or the model itself."""
    while (inner := compiled_from(model)) is not None:
        model = inner
    return model


def without_own_wrapper(model: torch.nn.Module) -> torch.nn.Module:
    """Return the model inside a wrapper created here, any other model unchanged."""
    return cast(torch.nn.Module, model._orig_mod) if model in _compiled_here else model


def compile_prepared(prepared: torch.nn.Module, plugin: TorchDynamoPlugin) -> torch.nn.Module:
    """Return a prepared model compiled, unless the user's code has compiled it, or a part of it.

    Compilation comes last, since torch splits the graph at the buckets of ``DistributedDataParallel`` only if it
    compiles that class too (https://docs.pytorch.org/docs/stable/notes/ddp.html#torchdynamo-ddpoptimizer).
    """
    if plugin.backend is DynamoBackend.NO or any(map(_is_compiled, prepared.modules())):
        return prepared
    if plugin.use_regional_compilation and _has_repeated_blocks(prepared):
        return compile_regions(prepared, **plugin.to_kwargs())
    compiled = cast(torch.nn.Module, torch.compile(prepared, **plugin.to_kwargs()))
    _compiled_here.add(compiled)
    return compiled


def _is_compiled(module: torch.nn.Module) -> bool:
    return is_compiled_module(module) or module._compiled_call_impl is not None


def _is_repeated(module: torch.nn.Module) -> bool:
    return isinstance(module, torch.nn.ModuleList) and len({type(block) for block in module}) == 1


def _has_repeated_blocks(module: torch.nn.Module) -> bool:
    return any(map(_is_repeated, module.modules()))


def compile_regions(module: torch.nn.Module, **compile_kwargs: Any) -> torch.nn.Module:
    """Compile each repeated block of a module, and the layers outside of them, in place; return the module.

    Args:
        module: The module.
        compile_kwargs: Arguments of ``torch.compile``.
    """
    if _is_repeated(module):
        for block in module.children():
            _compile_in_place(block, compile_kwargs)
    elif _has_repeated_blocks(module):
        for child in module.children():
            compile_regions(child, **compile_kwargs)
    elif not isinstance(module, (torch.nn.ModuleList, torch.nn.ModuleDict)):
        _compile_in_place(module, compile_kwargs)
    return module


def _compile_in_place(module: Any, compile_kwargs: dict[str, Any]) -> None:
    """Compile a module as ``module.compile()`` does, but also one of torch's own classes.

    Dynamo compiles no frame of ``torch.nn`` itself, so the call starts in a frame of this file.
    """

    def call(*args: Any, **kwargs: Any) -> Any:
        return module._call_impl(*args, **kwargs)

    module._compiled_call_impl = torch.compile(call, **compile_kwargs)
