"""A model's parameters that learn, and gradients that no backward pass has averaged."""

from __future__ import annotations

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

    A rank without a gradient that another one has counts as zeros.
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
    """A module that averages the gradients of the model in it, which is its attribute ``module``.

    It has the methods of that model, and pickles and copies as the model, since it means nothing outside its ranks.
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            # Methods only: other attributes couldn't be set as simply as they could be read.
            method = getattr(vars(self).get("_modules", {}).get("module"), name, None)
            if isinstance(method, types.MethodType):
                return method
            raise

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return operator.itemgetter(0), ((self.module,),)


class LearningParameters:
    """The parameters of a model that require gradients when this object is made.

    Attributes:
        learning: These parameters.
    """

    _registrations: ClassVar[int] = 0  # of parameters and modules, in any module of this process
    _latest: ClassVar[dict[int, int]] = {}  # the number of a module's last one, by its identity
    _hooks: ClassVar[list[Any]] = []

    def __init__(self, model: torch.nn.Module) -> None:
        if not self._hooks:
            self._hooks.append(register_module_module_registration_hook(self._count))
            self._hooks.append(register_module_parameter_registration_hook(self._count))
        self._model = model
        self._seen = self._registrations
        self._all = list(model.parameters())
        self._frozen = [parameter for parameter in self._all if not parameter.requires_grad]
        self.learning = [parameter for parameter in self._all if parameter.requires_grad]

    @classmethod
    def _count(cls, module: torch.nn.Module, *_: object) -> None:
        cls._registrations += 1
        cls._latest[id(module)] = cls._registrations

    def have_changed(self) -> bool:
        """Return whether layers have been frozen, unfrozen, added or replaced since."""
        if self._seen != self._registrations and self._are_others():
            return True
        return not all(map(_requires_grad, self.learning)) or any(map(_requires_grad, self._frozen))

    def _are_others(self) -> bool:
        if any(self._latest.get(id(module), 0) > self._seen for module in self._model.modules()):
            present: list[Any] = list(self._model.parameters())
            # Not while functional_call computes with other tensors in the parameters' places.
            if not all(isinstance(each, torch.nn.Parameter) for each in present):
                return False
            if list(map(id, present)) != list(map(id, self._all)):
                return True
        self._seen = self._registrations
        return False

    def added(self) -> list[torch.nn.Parameter]:
        """Return the parameters that the model has now and didn't have before."""
        known = set(map(id, self._all))
        return [parameter for parameter in self._model.parameters() if id(parameter) not in known]


def follow(model: torch.nn.Module) -> None:
    """Have the gradients of a model that averages them averaged for each step in which it wasn't called."""
    if hasattr(type(model), "_own_parameters"):  # that of XLA needs no call
        UncalledModels.followed += 1
        _averaging[UncalledModels.followed] = model


def follow_frozen(model: torch.nn.Module, backend: Backend) -> None:
    """Have the gradients averaged that a model may have later which is frozen as a whole."""
    UncalledModels.followed += 1
    _frozen[model] = _FrozenModel(model, backend)


def followed_parameters() -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all models whose gradients are averaged, whichever ``Accelerator`` has prepared them."""
    for model in [*_averaging.values(), *_frozen.values()]:
        yield from model._own_parameters()


class UncalledModels:
    """Averages gradients of models that were trained without a call of what ``prepare`` returned.

    ``DistributedDataParallel`` averages gradients in a backward pass only if the forward pass was a call of it. A loss
    can also come from a method of the model, or from one of its layers. Accelerate then trains a model of its own in
    each rank. Here those gradients are averaged before the optimizer uses them.

    Args:
        optimizer: The optimizer whose parameters are averaged.
    """

    followed: ClassVar[int] = 0  # models so far; the same on all ranks

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found_among: Any = None
        self._shared: list[_SharedParameters] = []
        self._find()
        self.has_stepped()

    def average(self, parameters: Iterable[torch.Tensor] | None, *, may_be_local: bool) -> None:
        """Average the gradients of models that weren't called since the last step. All ranks call it.

        Args:
            parameters: Only those of models that have one of these parameters; ``None`` for all.
            may_be_local: Leave alone what was called in ``no_sync`` only, as in local SGD.
        """
        self._find()
        uncalled = [shared for shared in self._shared if not shared.is_called]
        if parameters is not None and uncalled:  # another model may have gradients of its last step
            used = set(map(id, parameters))
            uncalled = [shared for shared in uncalled if not used.isdisjoint(map(id, shared.parameters))]
        if not uncalled:
            return
        # A model may have been prepared twice, or have another one as its part.
        averaged = {id(each) for shared in self._shared if shared.is_called for each in shared.parameters}
        for shared in reversed(uncalled):  # an earlier wrapper of the same model may be gone on some ranks
            model = shared.model()
            if model is None or not model.require_backward_grad_sync or (may_be_local and shared.is_local):
                continue
            left = [each for each in shared.parameters if id(each) not in averaged]
            averaged.update(map(id, left))
            left = [each for each in left if each.requires_grad or each.grad is not None]
            if any(each.grad is not None for each in left):
                model._average(left)

    def has_stepped(self) -> None:
        """Note that the optimizer has used the gradients."""
        for shared in self._shared:
            shared.note_calls()

    def _find(self) -> None:
        groups = self._optimizer.param_groups
        among = self.followed, [len(group["params"]) for group in groups]
        if among == self._found_among:
            return
        self._found_among = among
        own = {id(parameter) for group in groups for parameter in group["params"]}
        before = {id(shared.model()): shared for shared in self._shared}
        self._shared = []
        for model in [*_averaging.values(), *_frozen.values()]:
            parameters = [parameter for parameter in model._own_parameters() if id(parameter) in own]
            if parameters:
                known = before.get(id(model))
                calls = (0, 0) if known is None else known.calls_before
                self._shared.append(_SharedParameters(weakref.ref(model), parameters, calls))


class _FrozenModel:
    """A model that was prepared while all of it was frozen, so that it has no wrapper that averages gradients.

    It may be unfrozen later. Then its gradients are averaged for each step, like those of a model that isn't called.
    """

    _calls = 0
    _local_calls = 0
    require_backward_grad_sync = True

    def __init__(self, model: torch.nn.Module, backend: Backend) -> None:
        self._model = weakref.ref(model)
        self._backend = backend
        self._is_shared = False

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        model = self._model()
        return [] if model is None else list(model.parameters())

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average gradients, the first time with rank 0's weights for all ranks."""
        if not self._is_shared:
            self._is_shared = True
            for parameter in self._own_parameters():
                self._backend.broadcast(parameter.data, 0)
        average(parameters, self._backend.all_reduce, self._backend.place.world_size)


@dataclasses.dataclass(eq=False)
class _SharedParameters:
    """The parameters that a model and an optimizer have in common."""

    model: weakref.ref[Any]
    parameters: list[torch.nn.Parameter]
    calls_before: tuple[int, int]

    @property
    def is_called(self) -> bool:
        """True if the model was called since the last step, so that a backward pass has averaged its gradients."""
        model = self.model()
        return model is not None and model._calls != self.calls_before[0]

    @property
    def is_local(self) -> bool:
        """True if the model was called in ``no_sync`` since the last step."""
        model = self.model()
        return model is not None and model._local_calls != self.calls_before[1]

    def note_calls(self) -> None:
        """Note the calls so far."""
        model = self.model()
        if model is not None:
            self.calls_before = max(model._calls, 0), model._local_calls


_averaging: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_frozen: weakref.WeakKeyDictionary[torch.nn.Module, _FrozenModel] = weakref.WeakKeyDictionary()
