"""The backend for CPUs and NVIDIA GPUs: ``torch.distributed`` with gloo and NCCL."""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import pickle
import re
import struct
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from notebook_accel import environment
from notebook_accel.environment import RankPlace
from notebook_accel.errors import ConfigError, TrainingError
from notebook_accel.training import gradients
from notebook_accel.training.backends import group_recovery, torch_group
from notebook_accel.training.backends.devices import TorchDevice
from notebook_accel.training.handlers import (
    DDPCommunicationHookType,
    DistributedDataParallelKwargs,
    InitProcessGroupKwargs,
)

_logger = logging.getLogger("notebook_accel")

# torch 2.13 renamed the collective and warns about the old name.
_all_gather_single = getattr(dist, "all_gather_single", dist.all_gather_into_tensor)


class TorchDistributed(TorchDevice):
    """A ``Backend`` that uses torch's default process group, and creates it with ``options`` if there is none.

    Raises:
        TrainingError: The other ranks, or their store, weren't there in time.
    """

    def __init__(self, place: RankPlace, device: torch.device, options: InitProcessGroupKwargs) -> None:
        self.place = place
        self.device = device
        self._enter(options)
        self._has_left = False
        # Ranks on CPUs compare calls, since gloo ends the process when sizes differ. On a GPU the host would have to
        # wait for a further message. The comparison uses gloo, so that it isn't matched with another rank's gradients.
        is_asked = device.type == "cpu" or environment.is_debugging()
        self.compares_calls = place.world_size > 1 and is_asked and self._group.has_gloo_for(torch.device("cpu"))

    def _enter(self, options: InitProcessGroupKwargs) -> None:
        self._group = torch_group.enter(self.place, self.device, options)
        self._group.members.add(self)
        cpu = torch.device("cpu")
        # The device of tensors that the host itself sends.
        self._host_device: torch.device = cpu if self._group.has_gloo_for(cpu) else self.device
        self._scatter = ObjectScatter(self._host_device)

    def rejoin(self) -> None:
        self._enter(self._group.options or InitProcessGroupKwargs())

    @property
    def has_left(self) -> bool:
        return self._has_left or not self._group.is_current

    def explain(self, error: RuntimeError) -> None:
        self._group.explain(error)
        if "mark a variable ready only once" in str(error):
            raise TrainingError(
                "A second backward pass reached parameters whose gradients had been averaged.",
                why="One call of a prepared model averages the gradients of one backward pass. With "
                "checkpoint(..., use_reentrant=True), each use of a layer has a backward pass of its own.",
                fix="accelerator.backward(first_loss + second_loss); use_reentrant=False; or compute the losses from "
                "accelerator.unwrap_model(model)(...): then gradients are averaged when the optimizer steps",
            ) from error

    def absent_ranks(self) -> Sequence[int]:
        try:
            return self._group.absent_ranks()
        except RuntimeError as error:
            self._group.explain(error)
            raise

    def barrier(self) -> None:
        # Not dist.barrier, which has to guess the device if one group has several backends. gloo is preferred: a rank
        # that waits in NCCL keeps its GPU busy, and ends when another rank exceeds NCCL's deadline.
        ticket = torch.ones((), device=self._host_device)
        with self._explained():
            dist.all_reduce(ticket)
            ticket.item()

    def all_gather(self, tensor: torch.Tensor) -> torch.Tensor:
        tensor = _dense(tensor.detach())
        gathered = tensor.new_empty((self.place.world_size * tensor.shape[0], *tensor.shape[1:]))
        with self._explained():
            _all_gather_single(_as_bytes(gathered), _as_bytes(tensor))
        return gathered

    def all_reduce(self, tensor: torch.Tensor) -> None:
        with self._explained():
            dist.all_reduce(tensor)

    def broadcast(self, tensor: torch.Tensor, source: int) -> None:
        dense = _dense(tensor)
        with self._explained():
            dist.broadcast(_as_bytes(dense), source)
        if dense is not tensor:
            tensor.copy_(dense)

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.place.world_size
        with self._explained():
            dist.all_gather_object(values, value)
        return values

    def broadcast_object(self, value: Any, source: int) -> Any:
        values = [value]
        with self._explained():
            dist.broadcast_object_list(values, source)
        return values[0]

    def scatter_object(self, values: Sequence[Any] | None) -> Any:
        with self._explained():
            return self._scatter(values)

    def data_parallel(self, model: torch.nn.Module, options: DistributedDataParallelKwargs) -> torch.nn.Module:
        parallel = _DataParallel.__new__(_DataParallel)
        self._connect(parallel, model, options)
        group_recovery.track_parallel(parallel)
        gradients.register(parallel)
        return parallel

    def _connect(
        self,
        parallel: _DataParallel,
        model: torch.nn.Module,
        options: DistributedDataParallelKwargs,
        *,
        again: bool = False,
    ) -> None:
        devices = {parameter.device for parameter in model.parameters()}
        device = next(model.parameters()).device
        with self._explained():
            parallel.__init__(  # type: ignore[misc]  # also of one that was connected to an earlier group
                model,
                device_ids=[device] if device.type == "cuda" and len(devices) == 1 else None,
                process_group=self._group.for_gradients(device),
                init_sync=not again,
                **options.options(),
            )
        parallel._explain = self.explain
        parallel._watched = gradients.TrainableParameters(model)
        parallel._connect = functools.partial(self._connect, options=options)
        if not again:
            _register_hook(parallel, options)

    def mesh(self, sizes: Mapping[str, int], joint: Mapping[str, tuple[str, ...]]) -> Any:
        return self._group.mesh(self.device, sizes, joint)

    def background_group(self) -> Any:
        return self._group.for_background()

    def leave(self) -> None:
        self._has_left = True
        self._group.remove(self)

    @contextlib.contextmanager
    def _explained(self) -> Iterator[None]:
        self._group.calls += 1
        try:
            yield
        except RuntimeError as error:
            self._group.explain(error)
            raise


class _DataParallel(gradients.AveragingWrapper, DistributedDataParallel):
    """torch's ``DistributedDataParallel``, with errors that say what every rank was doing.

    A forward pass waits for other ranks where it broadcasts buffers, so it explains errors too. torch fixes the set of
    averaged parameters at construction; here a forward pass updates it when layers were frozen, unfrozen, added or
    replaced, or the model has lost its last buffer. For ``gradients.UncalledModels``, passes are counted.
    """

    _explain: Callable[[RuntimeError], None]
    _connect: Callable[..., None]
    _watched: gradients.TrainableParameters
    _passes: gradients.Passes
    _has_said_uncalled: bool = False

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.compiler.is_compiling():  # a compiled graph can't follow changes of the model
            self._passes.calls = -1
        elif torch.is_grad_enabled():
            if self.training and self.before_training_pass is not None:
                self.before_training_pass()
            if self._watched.have_changed() and not self._follow_changes():
                return self.module(*inputs, **kwargs)  # such as a discriminator during the generator's step
            if self.require_backward_grad_sync:
                self._passes.calls += 1
                self._passes.awaits_backward = True
            else:
                self._passes.begin_local()  # also if the program has set the attribute itself
        try:
            return super().forward(*inputs, **kwargs)  # type: ignore[no-untyped-call]
        except RuntimeError as error:
            self._explain(error)
            if "Expected to have finished reduction" in str(error):
                raise self._unused_parameters_error(error) from error
            raise

    def reconnect(self, *, again: bool = False) -> None:
        """Connect to the current group, in place.

        Variables that refer to this module, such as ``model``, stay valid, and it keeps its hooks.

        Args:
            again: The module is in this group already, and its parameters have changed.
        """
        attributes = vars(self)
        before = dict(attributes)
        hooks = {
            name: value
            for name, value in before.items()
            if isinstance(value, collections.OrderedDict) and "hooks" in name and value
        }
        module = self.module
        attributes.clear()
        try:
            with _temporarily_unfrozen(module, before["_watched"].trainable):
                before["_connect"](self, module, again=again)
        except BaseException:
            attributes.clear()
            attributes.update(before)  # so that a retry is possible
            raise
        # The second is False only within ``no_sync``.
        kept = ["training", "require_backward_grad_sync", "_passes", "_has_said_uncalled"]
        if again:
            kept.append("_join_config")
        attributes.update(hooks, **{name: before[name] for name in kept if name in before})
        self._passes.awaits_backward = False

    def _follow_changes(self) -> bool:
        """Update the parameters whose gradients torch averages. Return False if none requires a gradient."""
        if not any(parameter.requires_grad for parameter in self.module.parameters()):
            return False
        if self.find_unused_parameters and self._passes.local != self._passes.averaged_local:
            self._all_reduce(self._own_parameters())  # torch will forget what has been used since it last averaged
        added, hooks = self._watched.added(), self._comm_hooks
        self.reconnect(again=True)
        for hook, state in hooks:
            for of_buckets in ("p_memory_dict", "q_memory_dict", "error_dict"):  # of PowerSGD: buckets differ now
                getattr(state, of_buckets, {}).clear()
            self.register_comm_hook(state, hook)
        for parameter in added:
            contiguous = parameter.data.contiguous()
            dist.broadcast(contiguous, dist.get_global_rank(self.process_group, 0), group=self.process_group)
            if contiguous is not parameter.data:
                parameter.data.copy_(contiguous)
        return True

    def _forget_call(self) -> None:
        """Undo a call without a backward pass, so that torch doesn't take a later pass for that one."""
        self._passes.awaits_backward = False
        self.reducer._reset_state()

    def _unused_parameters_error(self, error: RuntimeError) -> TrainingError:
        trainable = [name for name, parameter in self.module.named_parameters() if parameter.requires_grad]
        found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", str(error))
        numbers = [int(number) for number in found[1].split()] if found else []
        names = [trainable[number] for number in numbers if number < len(trainable)]
        shown = f"{', '.join(names[:4])}{', ...' if len(names) > 4 else ''}" if names else "some parameters"
        return TrainingError(
            f"In its last step, {type(self.module).__name__} didn't use {shown} on this rank.",
            why="The other ranks wait for every gradient, unless they were told that some may be missing.",
            fix="Accelerator(kwargs_handlers=[DistributedDataParallelKwargs(find_unused_parameters=True)]), or set "
            "requires_grad_(False) for what is never used",
        )

    def _own_parameters(self) -> list[torch.nn.Parameter]:
        """Return the parameters whose gradients are averaged when they require one."""
        return [p for name, p in self.module.named_parameters() if name not in self.parameters_to_ignore]

    def _average(self, parameters: Sequence[torch.Tensor]) -> None:
        """Average the gradients of some parameters over the ranks, in place. All ranks call this."""
        if self._join_config.enable:
            if all(each.grad is None for each in parameters):
                return
            raise TrainingError(
                f"{type(self.module).__name__} is trained by calls of its methods or layers, or by several backward "
                "passes after one call, within join_uneven_inputs.",
                why="Ranks without further batches would take part in a backward pass of the prepared model only.",
                fix="call what prepare returned, loss = model(...), and call backward once for each call",
            )
        if self._watched.have_changed():
            self._follow_changes()  # to share the weights of added layers
        count = self._all_reduce(parameters)
        if self.find_unused_parameters and count:
            self._watched.expire()  # torch would expect gradients of what has been used since it last averaged
        if not count or self._has_said_uncalled or self._passes.awaits_backward:
            return
        self._has_said_uncalled = True
        if dist.get_rank(self.process_group) == 0:
            _logger.warning(
                "%s is trained by calls of its methods or layers, or by several backward passes after one call. So its "
                "gradients are averaged when the optimizer steps. It is faster to call what prepare returned, and to "
                "add up the losses: then gradients are averaged during the backward pass.",
                type(self.module).__name__,
            )

    def _all_reduce(self, parameters: Sequence[torch.Tensor]) -> int:
        try:  # not in the group of backward passes: one that another rank has left out would meet this
            return gradients.average(parameters, dist.all_reduce, dist.get_world_size())
        except RuntimeError as error:
            self._explain(error)
            raise

    def no_sync(self) -> Any:
        """Keep gradients local, as torch's ``no_sync`` does.

        Raises:
            TrainingError: ``static_graph`` is set, with which torch can't keep gradients local.
        """
        if self.static_graph:
            raise TrainingError(
                "Gradients can't be accumulated, nor left local by no_sync, with "
                "DistributedDataParallelKwargs(static_graph=True).",
                why="torch learns the static graph from the first backward pass, which has to average gradients.",
                fix="leave static_graph out, or average in each micro-batch: "
                "gradient_accumulation_plugin=GradientAccumulationPlugin(num_steps=..., sync_each_batch=True)",
            )
        self._passes.begin_local()
        return super().no_sync()

    def _sync_module_buffers(self, authoritative_rank: int) -> None:
        if self.modules_buffers:  # torch broadcasts no empty list
            super()._sync_module_buffers(authoritative_rank)  # type: ignore[no-untyped-call]

    @contextlib.contextmanager
    def sync_in_backward(self) -> Iterator[None]:
        """Average gradients in the body's backward pass, although the forward pass was in ``no_sync``.

        Raises:
            TrainingError: An option is set with which torch has to see the forward pass outside of ``no_sync``.
        """
        if self.find_unused_parameters or self.static_graph:
            raise TrainingError(
                "trigger_sync_in_backward can't be used with find_unused_parameters=True or static_graph=True.",
                why="torch learns in a forward pass outside of no_sync which gradients will come.",
                fix="make the last forward pass outside of no_sync",
            )
        before = self.require_backward_grad_sync
        self.require_backward_grad_sync = True
        self._passes.calls += 1
        self._passes.awaits_backward = True
        self.reducer.prepare_for_backward([])
        try:
            yield
        finally:
            self.require_backward_grad_sync = before


@contextlib.contextmanager
def _temporarily_unfrozen(model: torch.nn.Module, unfrozen: Iterable[torch.nn.Parameter]) -> Iterator[None]:
    """Unfreeze ``unfrozen`` in the body if the whole model is frozen, since torch refuses to wrap a frozen model."""
    frozen = [] if any(parameter.requires_grad for parameter in model.parameters()) else list(unfrozen)
    for parameter in frozen:
        parameter.requires_grad_(True)
    try:
        yield
    finally:
        for parameter in frozen:
            parameter.requires_grad_(False)


def _register_hook(parallel: DistributedDataParallel, options: DistributedDataParallelKwargs) -> None:
    kinds = DDPCommunicationHookType
    if options.comm_hook is kinds.NO:
        return
    # Not at the top: the import takes a while, and few programs need it.
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook

    hooks: dict[DDPCommunicationHookType, Any] = {
        kinds.FP16: default_hooks.fp16_compress_hook,
        kinds.BF16: default_hooks.bf16_compress_hook,
        kinds.POWER_SGD: powerSGD_hook.powerSGD_hook,
        kinds.BATCHED_POWER_SGD: powerSGD_hook.batched_powerSGD_hook,
    }
    wrappers: dict[DDPCommunicationHookType, Any] = {
        kinds.NO: lambda hook: hook,
        kinds.FP16: default_hooks.fp16_compress_wrapper,
        kinds.BF16: default_hooks.bf16_compress_wrapper,
    }
    state: object = parallel.process_group
    if options.comm_hook in (kinds.POWER_SGD, kinds.BATCHED_POWER_SGD):
        state = powerSGD_hook.PowerSGDState(state, **options.comm_state_option)
    try:
        parallel.register_comm_hook(state, wrappers[options.comm_wrapper](hooks[options.comm_hook]))
    except TypeError as error:
        raise ConfigError(
            f"Gradients can't be sent here with {options.comm_hook}.",
            why=str(error),
            fix="DDPCommunicationHookType.FP16",
        ) from None


def _dense(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor whose memory has its values in order: the tensor itself or a copy, such as of ``x.mT.conj()``."""
    return tensor.resolve_conj().resolve_neg().contiguous()


def _as_bytes(dense: torch.Tensor) -> torch.Tensor:
    """Return the same memory as bytes: every backend can send bytes, but not every type."""
    # Not by reshape: a single element is contiguous with any stride, such as that of scores[:, 1].
    return dense.as_strided((dense.numel(),), (1,)).view(torch.uint8)


_HEADER = struct.Struct("qq")  # the length of the longest of all ranks' objects, and of this rank's, in bytes
_FIRST_CAPACITY_BYTES = 1 << 12


class ObjectScatter:
    """Sends each rank an object from rank 0, in one message.

    torch's own function needs three messages, since ranks first have to learn the object's size. Here all ranks expect
    a size that grows with the objects sent so far, and only a larger object needs a second message. The group must be
    able to send tensors of ``device``.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._capacity_bytes = _FIRST_CAPACITY_BYTES

    def __call__(self, values: Sequence[Any] | None) -> Any:
        """Return this rank's item of rank 0's ``values``. All ranks call this; the others pass ``None``."""
        pickled = None if values is None else [pickle.dumps(value, pickle.HIGHEST_PROTOCOL) for value in values]
        received = self._exchange(pickled)
        longest, length = _HEADER.unpack_from(received)
        if longest > self._capacity_bytes:
            self._capacity_bytes = 1 << longest.bit_length()
            received = self._exchange(pickled)
        return pickle.loads(memoryview(received)[_HEADER.size : _HEADER.size + length])

    def _exchange(self, pickled: Sequence[bytes] | None) -> bytearray:
        size_bytes = _HEADER.size + self._capacity_bytes
        messages = None
        if pickled is not None:
            longest = max(map(len, pickled))
            fits = longest <= self._capacity_bytes
            texts = [_HEADER.pack(longest, len(text)) + (text if fits else b"") for text in pickled]
            messages = [_tensor(bytearray(text.ljust(size_bytes, b"\0"))).to(self._device) for text in texts]
        buffer = bytearray(size_bytes)
        received = _tensor(buffer)
        if self._device.type == "cpu":
            dist.scatter(received, messages, src=0)
        else:
            on_device = received.to(self._device)
            dist.scatter(on_device, messages, src=0)
            received.copy_(on_device)
        return buffer


def _tensor(buffer: bytearray) -> torch.Tensor:
    return torch.frombuffer(buffer, dtype=torch.uint8)
