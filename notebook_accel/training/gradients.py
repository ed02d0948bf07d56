"""A model's parameters that learn, and gradients that no backward pass has averaged."""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

import torch
from torch.nn.modules.module import (
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

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
