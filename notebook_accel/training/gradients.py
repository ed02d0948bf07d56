"""A model's parameters that learn, and gradients that no backward pass has averaged."""

from __future__ import annotations

import dataclasses
import itertools
import logging
import operator
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from notebook_accel.training.backends.backend import Backend

_logger = logging.getLogger("notebook_accel")
_requires_grad = operator.attrgetter("requires_grad")


def average(parameters: Iterable[torch.Tensor], all_reduce: Callable[[torch.Tensor], object], ranks: int) -> None:
    """Average gradients over the ranks, in place, by one call of ``all_reduce`` for each type. All ranks call this."""
    by_kind: dict[Any, list[Any]] = {}
    for parameter in parameters:
        if parameter.grad is not None:
            by_kind.setdefault((parameter.grad.dtype, parameter.grad.device), []).append(parameter)
    for alike in by_kind.values():
        gradients = [parameter.grad.to_dense() for parameter in alike]
        flat = torch.cat([gradient.reshape(-1) for gradient in gradients])
        all_reduce(flat)
        flat /= ranks
        means = torch.split_with_sizes(flat, [gradient.numel() for gradient in gradients])
        for parameter, piece in zip(alike, means, strict=True):
            mean, own = piece.view_as(parameter), parameter.grad
            parameter.grad = mean.to_sparse(own.sparse_dim()) if own.is_sparse else own.copy_(mean)


class LearningParameters:
    """The parameters of a model that require gradients when this object is made.

    Attributes:
        learning: These parameters.
    """

    _registrations: ClassVar[int] = 0  # of parameters and modules, in any module of this process
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
    def _count(cls, *_: object) -> None:
        cls._registrations += 1

    def have_changed(self) -> bool:
        """Return whether layers have been frozen, unfrozen, added or replaced since."""
        if self._seen != self._registrations:
            present = list(self._model.parameters())
            # Not while functional_call computes with other tensors in the parameters' places.
            if all(parameter.is_leaf for parameter in present):
                if list(map(id, present)) != list(map(id, self._all)):
                    return True
                self._seen = self._registrations
        return not all(map(_requires_grad, self.learning)) or any(map(_requires_grad, self._frozen))

    def added(self) -> list[torch.nn.Parameter]:
        """Return the parameters that the model has now and didn't have before."""
        known = set(map(id, self._all))
        return [parameter for parameter in self._model.parameters() if id(parameter) not in known]


def follow(model: torch.nn.Module) -> None:
    """Have the gradients of a model that averages them averaged for each step in which it wasn't called."""
    if hasattr(model, "average"):  # that of XLA needs no call
        _averaging[next(_numbers)] = model


def follow_frozen(model: torch.nn.Module, backend: Backend) -> None:
    """Have the gradients averaged that a model may have later which is frozen as a whole."""
    _frozen[model] = _FrozenModel(model, backend)


class UncalledModels:
    """Averages gradients of models that were trained without a call of what ``prepare`` returned.

    ``DistributedDataParallel`` averages gradients in a backward pass only if the forward pass was a call of it. A loss
    can also come from a method of the model, or from one of its layers. Accelerate then trains a model of its own in
    each rank. Here those gradients are averaged before the optimizer uses them.

    Args:
        optimizer: The optimizer whose parameters are averaged.
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._found_among = (-1, -1)
        self._shared: list[_SharedParameters] = []
        self._find()
        for shared in self._shared:
            shared.calls_before = shared.calls

    def average(self) -> None:
        """Average the gradients of models that weren't called since the last step. All ranks call it."""
        self._find()
        uncalled = [shared for shared in self._shared if shared.calls == shared.calls_before]
        if not uncalled:
            return
        # A model may have been prepared twice, or have another one as its part.
        called = {id(parameter) for shared in self._shared if shared not in uncalled for parameter in shared.parameters}
        for shared in uncalled:
            model = shared.model()
            left = [each for each in shared.parameters if each.grad is not None and id(each) not in called]
            if left and model is not None and model.require_backward_grad_sync:  # not in ``no_sync``
                if model.has_calls:
                    _log_uncalled(model)
                model.average(left)

    def has_stepped(self) -> None:
        """Note that the optimizer has used the gradients."""
        for shared in self._shared:
            shared.calls_before = max(shared.calls, 0)

    def _find(self) -> None:
        among = len(_averaging) + len(_frozen), len(self._optimizer.param_groups)
        if among == self._found_among:
            return
        self._found_among = among
        before = {shared.model: shared.calls_before for shared in self._shared}
        own = {id(parameter) for group in self._optimizer.param_groups for parameter in group["params"]}
        self._shared = []
        for model in [*_averaging.values(), *_frozen.values()]:
            parameters = [parameter for parameter in model.parameters() if id(parameter) in own]
            if parameters:
                reference = weakref.ref(model)
                self._shared.append(_SharedParameters(reference, parameters, before.get(reference, 0)))


class _FrozenModel:
    """A model that was prepared while all of it was frozen, so that it has no wrapper that averages gradients.

    It may be unfrozen later. Then its gradients are averaged for each step, like those of a model that isn't called.
    """

    has_calls = False
    calls = 0
    require_backward_grad_sync = True

    def __init__(self, model: torch.nn.Module, backend: Backend) -> None:
        self._model = weakref.ref(model)
        self._backend = backend
        self._is_shared = False

    def parameters(self) -> Iterator[torch.nn.Parameter]:
        model = self._model()
        return iter(()) if model is None else model.parameters()

    def average(self, parameters: Iterable[torch.Tensor]) -> None:
        """Average gradients, the first time with rank 0's weights for all ranks."""
        if not self._is_shared:
            self._is_shared = True
            for parameter in self.parameters():
                self._backend.broadcast(parameter.data, 0)
        average(parameters, self._backend.all_reduce, self._backend.place.world_size)


@dataclasses.dataclass(eq=False)
class _SharedParameters:
    """The parameters that a model and an optimizer have in common."""

    model: weakref.ref[Any]
    parameters: list[torch.nn.Parameter]
    calls_before: int

    @property
    def calls(self) -> int:
        """The model's calls so far; -1 once it is gone."""
        model = self.model()
        return -1 if model is None else int(model.calls)


_numbers = itertools.count()  # an order that is the same on all ranks
_averaging: weakref.WeakValueDictionary[int, Any] = weakref.WeakValueDictionary()
_frozen: weakref.WeakKeyDictionary[torch.nn.Module, _FrozenModel] = weakref.WeakKeyDictionary()
_said_of: weakref.WeakSet[torch.nn.Module] = weakref.WeakSet()


def _log_uncalled(model: Any) -> None:
    if model not in _said_of and model.process_group.rank() == 0:
        _logger.warning(
            "%s is trained by calls of its methods or layers. So its gradients are averaged when the optimizer steps. "
            "It is faster to call what prepare returned: then they are averaged during the backward pass.",
            type(model.module).__name__,
        )
    _said_of.add(model)
