"""Averages the gradients of what ``prepare`` has returned, and tracks a model's trainable parameters.

The rule: a backward pass outside of ``no_sync`` averages the gradients of a model that was called and of bare tensors,
and what any other pass has added is averaged where gradients are used, which changes nothing in those that are means.

An optimizer's step and clipping use gradients. Only a program that doesn't use ``accumulate`` can keep the gradients of
its own ``no_sync`` local: it steps there too, or has called the model there alone since the last step.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import operator
import types
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, ClassVar

import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)

from notebook_accel.training.backends.backend import Backend

_requires_grad = operator.attrgetter("requires_grad")
_weak_storage: Any = StorageWeakRef  # without types in torch


def average(parameters: Sequence[torch.Tensor], all_reduce: Callable[[torch.Tensor], object], ranks: int) -> int:
    """Average gradients over the ranks, in place, and return how many there were.

    All ranks call this with the same parameters. A gradient that only some ranks have counts as zeros on the others,
    and is sparse there if it is on any rank.
    """
    grads = [parameter.grad for parameter in parameters]
    numbers = [0 if grad is None else ranks + 1 if grad.is_sparse else 1 for grad in grads]
    found = torch.tensor(numbers, dtype=torch.int32, device=parameters[0].device)
    all_reduce(found)
    by_kind: dict[Any, list[Any]] = {}
    is_sparse: dict[int, bool] = {}
    for parameter, number in zip(parameters, found.tolist(), strict=True):
        if number:
            by_kind.setdefault((parameter.dtype, parameter.device), []).append(parameter)
            is_sparse[id(parameter)] = number > ranks
    for alike in by_kind.values():
        flat = torch.cat([_dense_gradient(parameter).reshape(-1) for parameter in alike])
        all_reduce(flat)
        flat /= ranks
        pieces = torch.split_with_sizes(flat, [parameter.numel() for parameter in alike])
        for parameter, piece in zip(alike, pieces, strict=True):
            mean, own = piece.view_as(parameter), parameter.grad
            if own is None:
                parameter.grad = mean.to_sparse(1) if is_sparse[id(parameter)] else mean.clone()
            else:
                parameter.grad = mean.to_sparse(own.sparse_dim()) if own.is_sparse else own.copy_(mean)
    return len(is_sparse)


def _dense_gradient(parameter: torch.Tensor) -> torch.Tensor:
    return torch.zeros_like(parameter) if parameter.grad is None else parameter.grad.to_dense()


class AveragingWrapper(torch.nn.Module):
    """A wrapper that averages the gradients of the model in its attribute ``module``.

    It has the model's methods. It pickles as the model, since the wrapper is meaningless outside its ranks.

    Attributes:
        before_training_pass: Called before each forward pass that trains, which may wait for the other ranks.
    """

    before_training_pass: Callable[[], None] | None = None

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
        all: All parameters at that time.
        trainable: Those that required gradients.
    """

    _registrations: ClassVar[int] = 0  # of parameters and modules, in any module of this process
    _latest: ClassVar[dict[int, int]] = {}  # the number of a module's last one, by its ``id``
    _hooks: ClassVar[list[Any]] = []

    def __init__(self, model: torch.nn.Module) -> None:
        if not self._hooks:
            self._hooks.append(register_module_module_registration_hook(self._count))
            self._hooks.append(register_module_parameter_registration_hook(self._count))
            self._hooks.append(register_module_buffer_registration_hook(self._count_buffer))
        self._model = model
        self._seen = self._registrations
        self.all = list(model.parameters())
        self._has_buffers = next(model.buffers(), None) is not None
        self._frozen = [parameter for parameter in self.all if not parameter.requires_grad]
        self.trainable = [parameter for parameter in self.all if parameter.requires_grad]
        self._witness = next((each for each in self.trainable if type(each.data) is torch.Tensor), None)
        self._follow_witness()

    @classmethod
    def _count(cls, module: torch.nn.Module, *_: object) -> None:
        cls._registrations += 1
        cls._latest[id(module)] = cls._registrations

    @classmethod
    def _count_buffer(cls, module: torch.nn.Module, name: str, _: object) -> None:
        if name not in module._buffers:  # a forward pass may set a buffer that is there
            cls._count(module)

    def expire(self) -> None:
        """Make ``have_changed`` return True."""
        self._seen = -1

    def have_changed(self) -> bool:
        """Return whether layers have been frozen, unfrozen, added, replaced, moved or cast, or first buffers added."""
        if self._seen != self._registrations and self._are_others():
            return True
        if self._has_expired() and self._has_moved():
            return True
        return not all(map(_requires_grad, self.trainable)) or any(map(_requires_grad, self._frozen))

    def _follow_witness(self) -> None:
        self._node: Any = None
        self._has_expired: Callable[[], Any] = bool
        if self._witness is not None:
            self._node = torch.autograd.graph.get_gradient_edge(self._witness).node
            self._storage: Any = _weak_storage(self._witness.untyped_storage())
            self._has_expired = functools.partial(torch.UntypedStorage._expired, self._storage.cdata)

    def _has_moved(self) -> bool:
        """Return whether the model was moved or cast, perhaps back, which drops the hooks that average gradients."""
        before = self._node
        self._follow_witness()
        return before is not self._node

    def _are_others(self) -> bool:
        if self._seen < 0:
            return True
        if any(self._latest.get(id(module), 0) > self._seen for module in self._model.modules()):
            present: list[Any] = list(self._model.parameters())
            # functional_call puts other tensors in the parameters' places for a while, which is no change.
            if not all(isinstance(each, torch.nn.Parameter) for each in present):
                return False
            has_buffers = next(self._model.buffers(), None) is not None
            if has_buffers != self._has_buffers or list(map(id, present)) != list(map(id, self.all)):
                return True
        self._seen = self._registrations
        return False

    def versions(self) -> list[tuple[torch.Tensor | None, int]]:
        """Return the gradients and their versions, which change when a backward pass adds to them."""
        return [(each.grad, 0 if each.grad is None else each.grad._version) for each in self.all]

    def added(self) -> list[torch.nn.Parameter]:
        """Return the parameters that were added to the model since the snapshot."""
        known = set(map(id, self.all))
        return [parameter for parameter in self._model.parameters() if id(parameter) not in known]


@dataclasses.dataclass(eq=False)
class Passes:
    """The passes of a model. An object of its own, since torch takes a microsecond to set an attribute of a model.

    Attributes:
        calls: Number of forward passes outside of ``no_sync``; -1 if ``torch.compile`` runs them, and -2 if there are
            none, since hooks average the gradients.
        local: Number of times that gradients may have become this rank's: calls in ``no_sync``, its contexts, and
            ``local_backwards``.
        local_backwards: Number of backward passes outside of ``no_sync`` that have added gradients of this rank.
        awaits_backward: True from a call to the backward pass that averages.
        averaged_local: ``local`` when a backward pass last averaged all gradients, also those of earlier passes.
    """

    calls: int = 0
    local: int = 0
    local_backwards: int = 0
    awaits_backward: bool = False
    averaged_local: int = 0

    def begin_local(self, *, backwards: int = 0) -> None:
        """Record that gradients of this rank follow, in ``no_sync`` or by ``backwards`` passes outside of it."""
        self.local += 1
        self.local_backwards += backwards

    def end_averaging(self) -> None:
        """Record that a backward pass has averaged all gradients."""
        self.averaged_local = self.local
        self.awaits_backward = False


def register(model: Any) -> None:
    """Register a wrapper whose gradients ``UncalledModels`` averages in steps in which the wrapper wasn't called."""
    model._passes = Passes()
    _wrappers.append(weakref.ref(model, _wrappers.remove))
    _add(model)


def register_frozen(model: torch.nn.Module, backend: Backend) -> None:
    """Register a fully frozen model, whose gradients ``UncalledModels`` averages if it is unfrozen later."""
    _frozen[model] = _FrozenModel(model, backend)
    _add(_frozen[model])


def _add(item: Any) -> None:
    UncalledModels.registered += 1
    REGISTERED.append(weakref.ref(item, REGISTERED.remove))


def registered_parameters() -> Iterator[torch.nn.Parameter]:
    """Yield the parameters of all registered models, whichever ``Accelerator`` has prepared them."""
    for model in _alive(REGISTERED):
        yield from model._own_parameters()


def begin_backward() -> Callable[[], None] | None:
    """Return a function to call after the backward pass that begins, or ``None``.

    It records the models whose gradients the pass has averaged, and those to which it has added local ones.
    """
    only = _wrappers[0]() if len(_wrappers) == 1 else None
    if only is not None:  # the usual loop, which needs no closer look
        passes: Passes = only._passes
        if not only.require_backward_grad_sync:
            return None
        if passes.awaits_backward or passes.calls < 0:
            return passes.end_averaging
    models = [model for model in _alive(_wrappers) if model.require_backward_grad_sync and model._passes.calls >= 0]
    before = [(model._passes, model._watched, model._watched.versions()) for model in models]
    return functools.partial(_compare_gradients, before) if before else None


def _compare_gradients(before: list[tuple[Passes, TrainableParameters, list[Any]]]) -> None:
    for passes, watched, versions in before:
        pairs = zip(versions, watched.versions(), strict=True)
        if any(old is not new or version != later for (old, version), (new, later) in pairs):
            if passes.awaits_backward:
                passes.end_averaging()
            else:
                passes.begin_local(backwards=1)


class UncalledModels:
    """Averages the gradients of an optimizer that no backward pass has averaged.

    ``DistributedDataParallel`` averages gradients in the first backward pass after a call of the wrapper that
    ``prepare`` returned. But a loss can come from a method of the model or one of its layers, each of several losses of
    one call can have its backward pass, and the last micro-batch of a window can have none, or use fewer parameters
    than the first; with Accelerate each rank then trains its own model.

    Args:
        optimizer: The optimizer whose parameters are averaged.
    """

    registered: ClassVar[int] = 0  # number of models registered so far; equal on all ranks

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        self._optimizer = optimizer
        self._counts = (0, 0)
        self._parameters: list[weakref.ref[torch.Tensor]] = []
        self._shared: weakref.WeakKeyDictionary[Any, list[torch.nn.Parameter]] = weakref.WeakKeyDictionary()
        self._before: dict[Passes, tuple[int, int, int]]
        self.has_stepped()

    def average(self, parameters: Iterable[torch.Tensor] | None, *, may_be_local: bool) -> None:
        """Average gradients that no backward pass since the last step has averaged. All ranks call this.

        Args:
            parameters: Average only models that have one of these parameters; ``None`` for all.
            may_be_local: Skip models that were called only in ``no_sync``, as in local SGD.
        """
        left = []
        for reference in list(REGISTERED):
            model = reference()
            if model is not None:
                passes = model._passes
                calls, local, _ = self._before.get(passes, _NONE)
                if passes.calls == calls >= 0 or passes.local not in (local, passes.averaged_local):
                    left.append(model)
        if not left:
            return
        self._find()
        left = [model for model in left if model in self._shared and self._is_averaged(model, may_be_local)]
        if parameters is not None:  # another model may have gradients of its last step
            used = set(map(id, parameters))
            left = [model for model in left if not used.isdisjoint(map(id, self._shared[model]))]
        # A model may have been prepared twice, or have another one as its part.
        averaged = {id(each) for model, shared in self._shared.items() if model not in left for each in shared}
        for model in reversed(left):  # an earlier wrapper of the same model may be gone on some ranks
            own = [each for each in self._shared[model] if id(each) not in averaged]
            averaged.update(map(id, own))
            own = [each for each in own if each.requires_grad or each.grad is not None]
            if own:
                model._average(own)
            passes = model._passes
            self._before[passes] = self._before.get(passes, _NONE)[0], passes.local, passes.local_backwards

    def _is_averaged(self, model: Any, may_be_local: bool) -> bool:
        """Return False for a model whose gradients the program keeps local."""
        passes = model._passes
        calls, local, local_backwards = self._before.get(passes, _NONE)
        is_only_local = passes.local != local and passes.local_backwards == local_backwards
        is_kept = may_be_local and is_only_local and (passes.calls == calls >= 0 or passes.calls == -1)
        return model.require_backward_grad_sync and not is_kept

    def has_stepped(self) -> None:
        """Record that the optimizer has used the gradients, and undo calls that have had no backward pass."""
        before = self._before = {}
        for reference in list(REGISTERED):
            model = reference()
            if model is None:
                continue
            passes = model._passes
            before[passes] = passes.calls, passes.local, passes.local_backwards
            if passes.awaits_backward:
                self._find()
                if model in self._shared:
                    model._forget_call()

    def _find(self) -> None:
        """Find the models that share parameters with the optimizer, again after either has changed."""
        parameters = [parameter for group in self._optimizer.param_groups for parameter in group["params"]]
        counts = self.registered, TrainableParameters._registrations
        known = [reference() for reference in self._parameters]
        if counts == self._counts and len(known) == len(parameters) and all(map(operator.is_, known, parameters)):
            return
        self._counts, self._parameters = counts, list(map(weakref.ref, parameters))
        own = set(map(id, parameters))
        self._shared = weakref.WeakKeyDictionary()
        for model in _alive(REGISTERED):
            shared = [parameter for parameter in model._own_parameters() if id(parameter) in own]
            if shared:
                self._shared[model] = shared


class HookedTensors:
    """Tensors that have no wrapper, such as a bare one: hooks average their gradients in the backward pass.

    Args:
        tensors: The tensors, held weakly. Their hooks hold this object.
        backend: The backend of this rank.
    """

    def __init__(self, tensors: Iterable[torch.Tensor], backend: Backend) -> None:
        self.require_backward_grad_sync = True
        self._passes = Passes(calls=-2)
        self._backend = backend
        self._tensors: list[weakref.ref[Any]] = []
        tensor: Any
        for tensor in tensors:
            self._tensors.append(weakref.ref(tensor))
            tensor.register_post_accumulate_grad_hook(self._average_now)
        if self._tensors:
            _add(self)

    def _own_parameters(self) -> list[Any]:
        return [tensor for tensor in (each() for each in self._tensors) if tensor is not None]

    def _average_now(self, tensor: torch.Tensor) -> None:
        if tensor.grad is not None and self.require_backward_grad_sync:
            mean = tensor.grad.contiguous()
            self._backend.all_reduce(mean)
            tensor.grad.copy_(mean / self._backend.place.world_size)

    def _average(self, tensors: Sequence[torch.Tensor]) -> None:
        average(tensors, self._backend.all_reduce, self._backend.place.world_size)

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Leave gradients local to this rank in the body's backward passes."""
        self._passes.begin_local()
        before, self.require_backward_grad_sync = self.require_backward_grad_sync, False
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


def hooked_among(tensors: Iterable[torch.Tensor]) -> list[HookedTensors]:
    """Return the objects that average the gradients of some of these tensors."""
    wanted = set(map(id, tensors))
    hooked = [each for each in _alive(REGISTERED) if isinstance(each, HookedTensors)]
    return [each for each in hooked if not wanted.isdisjoint(map(id, each._own_parameters()))]


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


_wrappers: list[weakref.ref[Any]] = []  # to models in a wrapper, in the order in which all ranks registered them
REGISTERED: list[weakref.ref[Any]] = []  # to these, frozen models and hooked tensors; empty in a single process
_NONE = 0, 0, 0  # passes before the first step
_frozen: weakref.WeakKeyDictionary[torch.nn.Module, _FrozenModel] = weakref.WeakKeyDictionary()


def _alive(references: Iterable[weakref.ref[Any]]) -> list[Any]:
    return [item for reference in references if (item := reference()) is not None]
