"""Tracks a model's trainable parameters, and averages gradients that no backward pass has averaged."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from notebook_accel.training.backends.backend import Backend

_requires_grad = operator.attrgetter("requires_grad")


def average(parameters: Sequence[torch.Tensor], all_reduce: Callable[[torch.Tensor], object], ranks: int) -> None:
    """Average gradients over the ranks, in place. All ranks call this with the same parameters.

    A gradient that only some ranks have counts as zeros on the others.
    """
    found = torch.tensor([each.grad is not None for each in parameters], dtype=torch.int32, device=parameters[0].device)
    all_reduce(found)
    by_kind: dict[Any, list[Any]] = {}
    for parameter, ranks_with_one in zip(parameters, found.tolist(), strict=True):
        if ranks_with_one:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
    for alike in by_kind.values():
        flat = torch.cat([_dense_gradient(parameter).reshape(-1) for parameter in alike])
        all_reduce(flat)
        flat /= ranks
        pieces = torch.split_with_sizes(flat, [parameter.numel() for parameter in alike])
        for parameter, piece in zip(alike, pieces, strict=True):
            mean, own = piece.view_as(parameter), parameter.grad
            if own is None:
                parameter.grad = mean.clone()
            else:
                parameter.grad = mean.to_sparse(own.sparse_dim()) if own.is_sparse else own.copy_(mean)


def _dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()


class AveragingWrapper(torch.nn.Module):
    """A wrapper that averages the gradients of the model in its attribute ``module``.

    It has the model's methods. It pickles as the model, since the wrapper is meaningless outside its ranks.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Methods only: setting another attribute would set it on the wrapper, not on the model.
            method = getattr(vars(self).get("_modules", {}).get("module"), name, None)
            if isinstance(method, types.MethodType):
                return method
            raise

    def __deepcopy__(self, memo: dict[int, Any]) -> torch.nn.Module:
        return _CopiedWrapper(copy.deepcopy(self.module, memo))

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.module,),)


class _CopiedWrapper(AveragingWrapper):
    """A deep copy of a wrapper, which averages nothing.

    Its parameters have the names of the wrapper's, so that either can load the other's state.
    """

    def __init__(self, module: torch.nn.Module) -> None:
        super().__init__()
        self.module = module
        self.training = module.training

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        return self.module(*inputs, **kwargs)


class TrainableParameters:
    """A snapshot of which parameters of a model require gradients.

    Attributes:
        trainable: The parameters that required gradients at that time.
    """

    _registrations: ClassVar[int] = 0  # of parameters and modules, in any module of this process
    _latest: ClassVar[dict[int, int]] = {}  # the number of a module's last one, by its ``id``
    _hooks: ClassVar[list[Any]] = []

    def __init__(self, model: torch.nn.Module) -> None:
        if not self._hooks:
            self._hooks.append(register_module_module_registration_hook(self._count))
            self._hooks.append(register_module_parameter_registration_hook(self._count))
        self._model = model
        self._seen = self._registrations
        self._all = list(model.parameters())
        self._frozen = [parameter for parameter in self._all if not parameter.requires_grad]
        self.trainable = [parameter for parameter in self._all if parameter.requires_grad]

    @classmethod
    def _count(cls, module: torch.nn.Module, *_: object) -> None:
        cls._registrations += 1
        cls._latest[id(module)] = cls._registrations

    def have_changed(self) -> bool:
        """Return whether layers have been frozen, unfrozen, added or replaced since the snapshot."""
        if self._seen != self._registrations and self._are_others():
            return True
        return not all(map(_requires_grad, self.trainable)) or any(map(_requires_grad, self._frozen))

    def _are_others(self) -> bool:
        if any(self._latest.get(id(module), 0) > self._seen for module in self._model.modules()):
            present: list[Any] = list(self._model.parameters())
            # functional_call puts other tensors in the parameters' places for a while, which is no change.
            if not all(isinstance(each, torch.nn.Parameter) for each in present):
                return False
            if list(map(id, present)) != list(map(id, self._all)):
                return True
        self._seen = self._registrations
        return False

    def versions(self) -> list[tuple[torch.Tensor | None, int]]:
        """Return the gradients and their versions, which change when a backward pass adds to them."""
        return [(each.grad, 0 if each.grad is None else each.grad._version) for each in self._all]

    def added(self) -> list[torch.nn.Parameter]:
        """Return the parameters that were added to the model since the snapshot."""
        known = set(map(id, self._all))
        return [parameter for parameter in self._model.parameters() if id(parameter) not in known]


@dataclasses.dataclass(eq=False)
class Passes:
    """The passes of a model. An object of its own, since torch takes a microsecond to set an attribute of a model.

    Attributes:
        calls: Number of forward passes outside of ``no_sync``; -1 if ``torch.compile`` runs them.
        local_calls: Number of those in ``no_sync``.
        awaits_backward: True from a call to the backward pass that averages.
        has_local_gradients: True if a backward pass after that one has added gradients of this rank.
    """

    calls: int = 0
    local_calls: int = 0
    awaits_backward: bool = False
    has_local_gradients: bool = False


def register(model: Any) -> None:
    """Register a wrapper whose gradients ``UncalledModels`` averages in steps in which the wrapper wasn't called."""
    global _newest
    model._passes = Passes()
    UncalledModels.registered += 1
    _averaging[UncalledModels.registered] = model
    _newest = weakref.ref(model)


def register_frozen(model: torch.nn.Module, backend: Backend) -> None:
    """Register a fully frozen model, whose gradients ``UncalledModels`` averages if it is unfrozen later."""
    UncalledModels.registered += 1
    _frozen[model] = _FrozenModel(model, backend)


def registered_parameters() -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all registered models, whichever ``Accelerator`` has prepared them."""
    for model in [*_averaging.values(), *_frozen.values()]:
        yield from model._own_parameters()


@contextlib.contextmanager
def noticing_local_gradients() -> Iterator[None]:
    """Record the models that get gradients of this rank in the body, a backward pass.

    ``DistributedDataParallel`` averages gradients in the first backward pass after a call. Those of a further one stay
    local, and those of a model that wasn't called.
    """
    newest = None if _newest is None else _newest()
    if newest is not None and len(_averaging) == 1 and newest.require_backward_grad_sync:
        passes = newest._passes
        if passes.awaits_backward or passes.calls < 0:  # the usual loop, which needs no closer look
            yield
            passes.awaits_backward = passes.has_local_gradients = False
            return
    models = [model for model in _averaging.values() if model.require_backward_grad_sync and model._passes.calls >= 0]
    before = [(model._passes, model._watched, model._watched.versions()) for model in models]
    yield
    for passes, watched, versions in before:
        pairs = zip(versions, watched.versions(), strict=True)
        if any(old is not new or version != later for (old, version), (new, later) in pairs):
            passes.has_local_gradients = not passes.awaits_backward
            passes.awaits_backward = False


class UncalledModels:
    """Averages gradients that no backward pass has averaged.

    ``DistributedDataParallel`` averages gradients only in the first backward pass after a call of the wrapper that
    ``prepare`` returned. But a loss can come from a method of the model or one of its layers, or each of several losses
    of one call can have its backward pass; with Accelerate each rank then trains its own model. Here those gradients
    are averaged before the optimizer uses them.

    Args:
        optimizer: The optimizer whose parameters are averaged.
    """

    registered: ClassVar[int] = 0  # number of models registered so far; equal on all ranks

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found_among: Any = None
        self._shared: weakref.WeakKeyDictionary[Any, _SharedParameters] = weakref.WeakKeyDictionary()  # by model
        self._find()
        self.has_stepped()

    def average(self, parameters: Iterable[torch.Tensor] | None, *, may_be_local: bool) -> None:
        """Average gradients that no backward pass since the last step has averaged. All ranks call this.

        Args:
            parameters: Average only models that have one of these parameters; ``None`` for all.
            may_be_local: Skip models that were called only in ``no_sync``, as in local SGD.
        """
        self._find()
        by_model = list(self._shared.items())
        uncalled = [
            (model, shared)
            for model, shared in by_model
            if model._passes.has_local_gradients or model._passes.calls == shared.calls_before
        ]
        if parameters is not None and uncalled:  # another model may have gradients of its last step
            used = set(map(id, parameters))
            uncalled = [
                (model, shared) for model, shared in uncalled if not used.isdisjoint(map(id, shared.parameters))
            ]
        if not uncalled:
            return
        # A model may have been prepared twice, or have another one as its part.
        left_out = {id(shared) for _, shared in uncalled}
        called = [shared for _, shared in by_model if id(shared) not in left_out]
        averaged = {id(each) for shared in called for each in shared.parameters}
        for model, shared in reversed(uncalled):  # an earlier wrapper of the same model may be gone on some ranks
            if not model.require_backward_grad_sync:
                continue
            is_called_locally = model._passes.local_calls != shared.local_calls_before
            if may_be_local and is_called_locally and not model._passes.has_local_gradients:
                continue
            left = [each for each in shared.parameters if id(each) not in averaged]
            averaged.update(map(id, left))
            left = [each for each in left if each.requires_grad or each.grad is not None]
            if any(each.grad is not None for each in left):
                model._average(left)

    def has_stepped(self) -> None:
        """Record that the optimizer has used the gradients."""
        for model, shared in self._shared.items():
            passes = model._passes
            shared.calls_before, shared.local_calls_before = max(passes.calls, 0), passes.local_calls

    def _find(self) -> None:
        groups = self._optimizer.param_groups
        among = self.registered, [len(group["params"]) for group in groups]
        if among == self._found_among:
            return
        self._found_among = among
        own = {id(parameter) for group in groups for parameter in group["params"]}
        before, self._shared = self._shared, weakref.WeakKeyDictionary()
        for model in [*_averaging.values(), *_frozen.values()]:
            parameters = [parameter for parameter in model._own_parameters() if id(parameter) in own]
            if parameters:
                self._shared[model] = before.get(model) or _SharedParameters()
                self._shared[model].parameters = parameters


class _FrozenModel:
    """A model that was fully frozen when it was prepared, so that it has no wrapper that averages gradients.

    If it is unfrozen later, its gradients are averaged before each step, like those of an uncalled model.
    """

    _passes = Passes()
    require_backward_grad_sync = True

    def __init__(self, model: torch.nn.Module, backend: Backend) -> None:
        self._model = weakref.ref(model)
        self._backend = backend
        self._is_shared = False

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        model = self._model()
        return [] if model is None else list(model.parameters())

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients. The first call also broadcasts rank 0's weights."""
        if not self._is_shared:
            self._is_shared = True
            for parameter in self._own_parameters():
                self._backend.broadcast(parameter.data, 0)
        average(parameters, self._backend.all_reduce, self._backend.place.world_size)


@dataclasses.dataclass(eq=False)
class _SharedParameters:
    """The parameters that a model and an optimizer have in common, and the model's calls before the last step."""

    parameters: list[torch.nn.Parameter] = dataclasses.field(default_factory=list)
    calls_before: int = 0
    local_calls_before: int = 0  # those in ``no_sync``


_averaging: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_newest: weakref.ref[Any] | None = None  # to the model that was registered last
_frozen: weakref.WeakKeyDictionary[torch.nn.Module, _FrozenModel] = weakref.WeakKeyDictionary()
