"""Gradient accumulation: decides when gradients sync, and divides the loss.

A window is the sequence of micro-batches whose gradients make one optimizer step. Each window of an epoch has
``num_steps`` micro-batches, except the last one, which ends with the loader.
"""

from __future__ import annotations

import contextlib
import dataclasses
import os
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from notebook_accel import code_places, environment
from notebook_accel.errors import ConfigError
from notebook_accel.training import fsdp, gradients, process_group
from notebook_accel.training.backends import group_recovery
from notebook_accel.training.handlers import KwargsHandler
from notebook_accel.training.loader_position import ACTIVE_ITERATIONS, LoaderIteration
from notebook_accel.training.sharding import Tail

if TYPE_CHECKING:
    from typing_extensions import Self


@dataclasses.dataclass
class GradientAccumulationPlugin(KwargsHandler):
    """Settings of gradient accumulation.

    Attributes:
        num_steps: Micro-batches in a window; by default the ``Accelerator``'s ``gradient_accumulation_steps``.
        adjust_scheduler: Advance a scheduler by all the micro-batches of a window instead of by one, for a schedule
            that was planned in micro-batches. Accelerate's default is ``True``, which has no effect on the learning
            rate there, so that ``False`` gives the same numbers.
        sync_with_dataloader: End a window where the loader ends.
        sync_each_batch: Average gradients over the ranks after every micro-batch instead of once in a window. This is
            slower, but no rank holds gradients of its own.
        scale_last_window: Divide the loss of a shorter last window by its real length, so that its step is the mean
            over its micro-batches like any other. By default it is divided by ``num_steps``, as Accelerate does, which
            is right for programs that multiply the loss by ``gradient_accumulation_steps``.

    Raises:
        ConfigError: ``num_steps`` isn't a whole number from 1.
    """

    num_steps: int | None = None
    adjust_scheduler: bool = False
    sync_with_dataloader: bool = True
    sync_each_batch: bool = False
    scale_last_window: bool = False

    def __post_init__(self) -> None:
        if self.num_steps is not None:
            _check_steps("GradientAccumulationPlugin(num_steps=...)", self.num_steps)


def resolve(
    steps: int | None, plugin: GradientAccumulationPlugin | None, environ: Mapping[str, str] = os.environ
) -> GradientAccumulationPlugin:
    """Return the plugin that results from ``gradient_accumulation_steps``, the given plugin and the launch.

    The launch's setting, an environment variable, is for programs that don't set a number themselves.

    Raises:
        ConfigError: ``steps`` and the plugin have different numbers, or a number isn't a whole number from 1.
    """
    plugin = plugin or GradientAccumulationPlugin()
    if steps is not None:
        _check_steps("gradient_accumulation_steps", steps)
    if steps not in (None, 1) and plugin.num_steps not in (None, steps):
        raise ConfigError(
            f"gradient_accumulation_steps is {steps}, and the plugin's num_steps is {plugin.num_steps}.",
            fix="give one of them",
        )
    of_program = steps if plugin.num_steps is None else plugin.num_steps
    of_launch = _steps_of_launch(environ)
    if of_launch is not None and of_program not in (None, of_launch):
        warnings.warn(
            f"The launch sets gradient_accumulation_steps={of_launch}, but the Accelerator sets {of_program}, which is "
            "used.",
            stacklevel=3,
        )
    return dataclasses.replace(plugin, num_steps=(of_launch or 1) if of_program is None else of_program)


def _check_steps(name: str, steps: object) -> None:
    if not isinstance(steps, int) or isinstance(steps, bool) or steps < 1:
        raise ConfigError(f"{name} is {steps!r}.", why="It is a number of micro-batches.", fix="a whole number from 1")


def _steps_of_launch(environ: Mapping[str, str]) -> int | None:
    name = environment.GRADIENT_ACCUMULATION_STEPS
    text = environ.get(name, "")
    if text and not (text.isdecimal() and int(text) > 0):
        raise ConfigError(
            f"The environment variable {name} is {text!r}, which isn't a number of steps.", fix=f"unset {name}"
        )
    return int(text) if text else None


class GradientState:
    """The accumulation window of an ``Accelerator``, shared with its optimizers and schedulers.

    All states of a process see the current batch, whichever ``Accelerator`` has prepared the loader. But a new state
    ignores earlier batches: an exception may have ended their iteration, and a notebook keeps the traceback, which
    keeps the iterator alive.

    Args:
        plugin: The plugin that ``resolve`` returns. Without one, this is the state of the latest ``Accelerator``.

    Attributes:
        plugin: Settings of gradient accumulation.
        num_steps: Micro-batches in a window.
        sync_gradients: True if this micro-batch ends a window, so that gradients are averaged over the ranks and
            optimizers step.
        micro_batches: Micro-batches of the window so far; 0 unless ``accumulate`` is used.
        is_unused: True if a backward pass has computed gradients that no prepared optimizer has used yet.
        joins_uneven: True within ``join_uneven_inputs``.
    """

    _latest: ClassVar[Any] = None

    def __new__(cls, plugin: GradientAccumulationPlugin | None = None) -> Self:
        return super().__new__(cls) if plugin is not None or cls._latest is None else cls._latest

    def __init__(self, plugin: GradientAccumulationPlugin | None = None) -> None:
        if plugin is None and self is GradientState._latest:
            return
        self.plugin = plugin or GradientAccumulationPlugin()
        self.num_steps = self.plugin.num_steps or 1
        self.joins_uneven = False
        self._since = ACTIVE_ITERATIONS.moment
        self._said: set[str] = set()
        self._has_compared = False  # the gradients of a window, before its last backward pass
        self._block: tuple[int | None, set[int]] = None, set()  # the moment and the models of the latest ``accumulate``
        self.reset()
        GradientState._latest = self
        if plugin is not None:  # created by an Accelerator, equally often on every rank
            group_recovery.track_state(self)

    def reset(self) -> None:
        """Forget an unfinished window."""
        self.sync_gradients = True
        self.is_unused = False
        self._divisor = self.num_steps
        self.micro_batches = 0
        self._count_gradients: Callable[[], int] | None = None  # from the begin of a last micro-batch to its backward
        self._accumulated = 0  # the gradients at that begin

    abandon_step = reset  # after an interrupt

    @classmethod
    def _reset_state(cls) -> None:
        """Forget the latest ``Accelerator``'s window, so that the next state without a plugin is a new one."""
        cls._latest = None

    def _set_sync_gradients(self, sync_gradients: bool) -> None:
        """Set whether gradients sync and optimizers step, for a program that counts batches itself."""
        self.sync_gradients = sync_gradients

    @property
    def is_in_window(self) -> bool:
        """True if there are accumulated gradients that haven't synced yet."""
        return not self.sync_gradients

    def change_steps(self, steps: int) -> None:
        """Change the number of micro-batches in a window; an unfinished window ends when it has that many.

        Raises:
            ConfigError: ``steps`` isn't a whole number from 1.
        """
        _check_steps("gradient_accumulation_steps", steps)
        self.num_steps = steps
        # In an unfinished window, losses were divided by the old number; gradients are rescaled where it ends.
        if self.sync_gradients or not self.plugin.scale_last_window:
            self._divisor = steps

    def state_dict(self) -> dict[str, Any]:
        """Return the state of the window, for a checkpoint."""
        return {
            "sync_gradients": self.sync_gradients,
            "is_unused": self.is_unused,
            "divisor": self._divisor,
            "micro_batches": self.micro_batches,
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore a state that ``state_dict`` has returned."""
        self.sync_gradients = state["sync_gradients"]
        self.is_unused = state.get("is_unused", False)
        self._divisor = state["divisor"]
        self.micro_batches = state["micro_batches"]

    def __repr__(self) -> str:
        shown = ("num_steps", "sync_gradients", "in_dataloader", "end_of_dataloader", "remainder")
        return f"GradientState({', '.join(f'{name}={getattr(self, name)!r}' for name in shown)})"

    @property
    def adjust_scheduler(self) -> bool:
        """The plugin's setting."""
        return self.plugin.adjust_scheduler

    @property
    def sync_with_dataloader(self) -> bool:
        """The plugin's setting."""
        return self.plugin.sync_with_dataloader

    @property
    def initialized(self) -> bool:
        """True, since a state works as soon as it is made."""
        return True

    @property
    def active_dataloader(self) -> Any:
        """The prepared loader that the current batch came from; ``None`` outside of a loop."""
        current = self._seen(ACTIVE_ITERATIONS.current)
        return None if current is None else current.loader

    @property
    def in_dataloader(self) -> bool:
        """True while a prepared loader is being iterated."""
        return any(self._seen(running) is not None for running in ACTIVE_ITERATIONS.running)

    @property
    def end_of_dataloader(self) -> bool:
        """True if the current batch is the last of its loader."""
        current = self._seen(ACTIVE_ITERATIONS.current)
        return current is not None and current.is_last

    @property
    def tail(self) -> Tail | None:
        """The round of the current batch if it is the last round and differs from the others, else ``None``."""
        current = self._seen(ACTIVE_ITERATIONS.current)
        return None if current is None else current.tail

    @property
    def remainder(self) -> int:
        """The number of real samples in the current round if it is the last one and repeats any; otherwise -1."""
        return -1 if self.tail is None else self.tail.real

    def _seen(self, current: LoaderIteration | None) -> LoaderIteration | None:
        return current if current is not None and current.moment > self._since else None

    def accumulate(
        self, models: Sequence[Any], parameters: Callable[[], Sequence[torch.Tensor]] = list
    ) -> contextlib.AbstractContextManager[None]:
        """Return a context for one micro-batch, in which gradients stay local unless it ends a window.

        ``parameters`` returns those of the optimizers. If the window is shorter than expected when it began, their
        gradients are rescaled where its last micro-batch begins.
        """
        return _MicroBatch(self, models, parameters)

    def _begin_micro_batch(self, models: Sequence[Any], parameters: Callable[[], Sequence[torch.Tensor]]) -> None:
        current = self._seen(ACTIVE_ITERATIONS.training)
        if self.num_steps > 1:
            before, self._block = self._block, (None if current is None else current.moment, set(map(id, models)))
            if before[0] == self._block[0] is not None and models and before[1].isdisjoint(self._block[1]):
                self._warn_of_second_block()
        if not self.plugin.sync_with_dataloader:
            current = None
        if self.sync_gradients:
            self.micro_batches = 0
            self._divisor = self._expected_length(current)
        self.micro_batches += 1
        self.sync_gradients = self.micro_batches >= self.num_steps or (current is not None and current.ends_window)
        length = self.micro_batches
        if self.sync_gradients and length > 1 and not self._has_compared:
            self._count_gradients = lambda: len(fsdp.gradients_of(parameters()))
            self._accumulated = self._count_gradients()
        if self.sync_gradients and length != self._divisor and self.plugin.scale_last_window:
            for gradient in fsdp.gradients_of(parameters()):
                gradient.mul_(self._divisor / length)
            self._divisor = length

    def _warn_of_second_block(self) -> None:
        self._warn(
            f"A second accumulate block for one batch counts as a further one of the {self.num_steps} "
            "micro-batches of a step, so that models step at wrong times. Fix: one block for both, "
            "accelerator.accumulate(first, second), or an Accelerator for each"
        )

    def _warn_if_dropped(self, count: Callable[[], int]) -> None:
        self._count_gradients, self._has_compared = None, True
        if self.is_unused and count() < self._accumulated:
            self._warn(
                f"Only the last of {self.micro_batches} micro-batches counts in this step: zero_grad has dropped the "
                "gradients of the others. Fix: optimizer.zero_grad() after optimizer.step(), not at the start"
            )

    def warn_of_closure(self) -> None:
        """Warn that a closure has computed gradients in the last micro-batch of a window only."""
        self._warn(
            f"Only the last of {self.micro_batches} micro-batches counts in this step: step(closure) calls the "
            "closure there alone. Fix: gradient_accumulation_steps=1, and add up gradients inside of the closure"
        )

    def _warn(self, text: str) -> None:
        if text not in self._said and process_group.rank_place().rank == 0:
            code_places.warn(text)
        self._said.add(text)

    def _expected_length(self, current: LoaderIteration | None) -> int:
        """Return the length of the window that begins, as far as the loader's length is known."""
        if current is None or current.total is None or not self.plugin.scale_last_window:
            return self.num_steps
        batches_left = current.total - current.counter.step + 1
        return max(1, min(self.num_steps, batches_left))

    def divide(self, loss: torch.Tensor) -> torch.Tensor:
        """Return the loss of a micro-batch divided by the length of its window.

        Raises:
            TrainingError: Gradients would sync with ranks that have no such batch.
        """
        self.refuse_missing_ranks()
        if self._count_gradients is not None:
            self._warn_if_dropped(self._count_gradients)
        self.is_unused = True
        return loss if self._divisor == 1 else loss / self._divisor

    def refuse_missing_ranks(self) -> None:
        """Raise ``TrainingError`` if gradients would sync with ranks that have no further batch."""
        training = ACTIVE_ITERATIONS.training
        if training is not None and training.tail is not None and self.sync_gradients and not self.joins_uneven:
            joining = ", or with accelerator.join_uneven_inputs([model]): around the loop"
            self._refuse_missing(training, "gradients", joining)

    def refuse_missing_shards(self) -> None:
        """Raise ``TrainingError`` if a forward pass would wait for shards of ranks that have no further batch."""
        self._refuse_missing(ACTIVE_ITERATIONS.current, "shares of the model")

    def _refuse_missing(self, iteration: LoaderIteration | None, awaited: str, further_fix: str = "") -> None:
        current = self._seen(iteration)
        if current is not None and current.tail is not None and current.tail.missing:
            fix = f"even_batches=True, or DataLoader(..., drop_last=True){further_fix}"
            raise current.tail.missing_error(f"this one would wait in vain for their {awaited}", fix)


class _MicroBatch:
    """The context of a micro-batch, a class because a generator would cost several microseconds more each time."""

    __slots__ = ("_local", "_models", "_parameters", "_state")

    def __init__(
        self, state: GradientState, models: Sequence[Any], parameters: Callable[[], Sequence[torch.Tensor]]
    ) -> None:
        self._state = state
        self._models = models
        self._parameters = parameters
        self._local: contextlib.ExitStack | None = None

    def __enter__(self) -> None:
        state = self._state
        state._begin_micro_batch(self._models, self._parameters)
        if state.sync_gradients or state.plugin.sync_each_batch:
            return
        if len(self._models) == 1 and isinstance(self._models[0], gradients.AveragingWrapper):
            self._local = self._models[0].no_sync()
            self._local.__enter__()
            return
        for model in self._models:
            if _may_sync(type(model)) or fsdp.is_sharded(model):
                self._local = stack = self._local or contextlib.ExitStack()
                stack.enter_context(no_sync(model))

    def __exit__(self, *error: Any) -> None:  # noqa: PYI036  # as ExitStack takes it
        if self._local is not None:
            self._local.__exit__(*error)


def _may_sync(kind: type) -> bool:
    """Return whether objects of a class can have ``no_sync``, without the slow lookup in a module that lacks it."""
    return hasattr(kind, "no_sync") or getattr(kind, "__getattr__", None) is not torch.nn.Module.__getattr__


def no_sync(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the backward pass leaves ``model``'s gradients local to this rank."""
    if isinstance(model, torch.Tensor) or fsdp.is_sharded(model):
        return _hooked_no_sync(model)
    method = getattr(model, "no_sync", None)
    return method() if callable(method) else contextlib.nullcontext()


@contextlib.contextmanager
def _hooked_no_sync(model: torch.nn.Module | torch.Tensor) -> Iterator[None]:
    with contextlib.ExitStack() as local:
        if not isinstance(model, torch.Tensor):
            local.enter_context(fsdp.no_sync(model))
        for each in gradients.hooked_among([model] if isinstance(model, torch.Tensor) else model.parameters()):
            local.enter_context(each.no_sync())
        yield


def sync_in_backward(model: Any) -> contextlib.AbstractContextManager[Any]:
    """Return a context in which the backward pass averages gradients, although the forward pass was in ``no_sync``.

    Raises:
        TrainingError: The model is sharded.
    """
    fsdp.refuse_sharded([model], "trigger_sync_in_backward", "make the last forward pass outside of no_sync")
    method = getattr(model, "sync_in_backward", None)  # a bare tensor's gradient always syncs outside of ``no_sync``
    return method() if callable(method) else contextlib.nullcontext()
