"""The position of a loader: its epoch, the current batch, and the point at which it resumes from a checkpoint.

A resumed epoch draws its order again from the random states saved at its start, so that it yields the same batches.
Later draws use the current random states.
"""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import types
import warnings
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from notebook_accel import environment
from notebook_accel.reporting import Counter, reporter
from notebook_accel.training import process_group, random_state
from notebook_accel.training.sharding import MarkedBatch, Tail

_PLAIN = (torch.Tensor, bool, int, float, complex, str, bytes, type(None))
_NOTHING: Any = object()


class EpochCounter:
    """Counts the epochs of a loader, from 0. ``following`` is the one that begins next.

    The sampler and the dataset were last told of the epoch ``passed_on``. If the counter ``is_shared``, the running
    epoch is in memory shared with worker processes that outlive an epoch.
    """

    def __init__(self, *, is_shared: bool = False) -> None:
        self.following = 0
        self.passed_on: int | None = None
        self._running: Any = multiprocessing.RawValue("q", 0) if is_shared else types.SimpleNamespace(value=0)

    @property
    def running(self) -> int:
        """The epoch that began last; 0 before the first."""
        epoch: int = self._running.value
        return epoch

    def state_dict(self) -> dict[str, Any]:
        """Return the epoch that begins next."""
        return {"following": self.following}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Set the next epoch to the saved one."""
        self.following = state["following"]

    def begin(self) -> int:
        """Start an epoch and return its number."""
        self._running.value = epoch = self.following
        self.following += 1
        return epoch


@dataclasses.dataclass(slots=True, eq=False)
class LoaderIteration:
    """One iteration over a loader, from its first batch to its last or to a ``break``.

    Attributes:
        counter: The loader's progress. Its ``step`` is the number of batches handed out.
        total: Number of batches, ``None`` if the loader has no length.
        is_last: True during the last batch.
        ends_window: True if an accumulation window ends with this batch: the last one, or the last that every rank has.
        tail: The ``Tail`` of the current round, ``None`` if that round is like the others.
        upload_next: A function that starts the transfer of the next batch to the device; ``None`` if there is none.
        moment: The value of ``ActiveIterations.moment`` when the current batch was handed out.
        loader: The loader.
        before_next: A function to call when the loop asks for the next batch; ``None`` if there is none.
    """

    counter: Counter
    total: int | None
    is_last: bool = False
    ends_window: bool = False
    tail: Tail | None = None
    upload_next: Callable[[], None] | None = None
    moment: int = 0
    loader: Any = None
    before_next: Callable[[], None] | None = None

    def pass_epoch_on(self) -> None:
        """Have the loader set the next epoch, since this iteration is over."""
        if self.loader is not None:
            self.loader.pass_epoch_on()


@dataclasses.dataclass(slots=True, eq=False)
class ActiveIterations:
    """The iterations that are running in this process.

    Attributes:
        running: All running iterations, in the order in which they began.
        current: The iteration that handed out a batch last.
        training: The iteration that handed out a batch last while gradients were enabled.
        moment: A logical clock, which counts iterations begun and batches handed out.
        ended: For the latest iteration that has handed out repeated samples and has ended: the ``moment`` of its last
            batch, the number of samples that it has handed out here, and the last ``Tail``.
    """

    running: list[LoaderIteration] = dataclasses.field(default_factory=list)
    current: LoaderIteration | None = None
    training: LoaderIteration | None = None
    moment: int = 0
    ended: tuple[int, int, Tail] | None = None

    def abandon(self) -> None:
        """Forget iterations that an error ended and that its traceback keeps alive.

        An iteration that the user's code still holds is registered again with its next batch.
        """
        for iteration in self.running:
            iteration.pass_epoch_on()
        self.running = []
        self.current = self.training = None

    @contextlib.contextmanager
    def iterating(self, counter: Counter, total: int | None) -> Iterator[LoaderIteration]:
        """Register an iteration for as long as the body runs. An earlier one with the same counter is abandoned."""
        current = LoaderIteration(counter, total)
        self.moment = current.moment = self.moment + 1
        self.running = [*(other for other in self.running if other.counter is not counter), current]
        try:
            yield current
        finally:
            self.running = [other for other in self.running if other is not current]
            outer = self.running[-1] if self.running else None
            if self.current is current:
                self.current = outer
            if self.training is current:
                self.training = outer
            reporter().end(None if outer is None else outer.counter)

    def upload_next(self) -> None:
        """Start the transfer of the next batch. Call it when the device has work during which the transfer can run."""
        if self.current is not None and self.current.upload_next is not None:
            self.current.upload_next()

    def before_next(self, function: Callable[[], None]) -> None:
        """Call ``function`` when the training loop asks for its next batch, so after the current step."""
        if self.training is not None:
            self.training.before_next = function

    def hand_out(self, current: LoaderIteration) -> None:
        """Make ``current`` the iteration that handed out a batch last."""
        self.moment = current.moment = self.moment + 1
        self.current = current
        # An evaluation in the middle of a window doesn't change the position of training.
        if torch.is_grad_enabled():
            self.training = current


# All Accelerators of a process share the current batch.
ACTIVE_ITERATIONS = ActiveIterations()


@dataclasses.dataclass(frozen=True)
class Deal:
    """How the samples of an epoch are dealt out to the ranks.

    Attributes:
        ranks: Number of ranks.
        round_samples: Number of samples that all ranks together take at a time.
        epoch_samples: Number of samples of the dataset, ``None`` if unknown.
        batch_samples: Number of samples of a sampler's batch if each rank takes whole ones, else ``None``.
        workers: Number of worker processes that read a stream, each its own part; 1 for a dataset with indices.
    """

    ranks: int
    round_samples: int
    epoch_samples: int | None
    batch_samples: int | None = None
    workers: int = 1

    def samples_after(self, batches: int, skipped: int) -> int:
        """Return how many samples all ranks have taken when each has taken ``batches``.

        ``skipped`` is ``ResumePoint.undealt``.
        """
        return skipped * (self.batch_samples or 0) + (batches - self.rounds_of(skipped)) * self.round_samples

    def rounds_of(self, batches: int) -> int:
        """Return the number of rounds in which the ranks take this many batches of the sampler."""
        return -(-batches // self.ranks)


@dataclasses.dataclass
class ResumePoint:
    """The position of a loader when a checkpoint was saved. The checkpoint has these field names.

    Attributes:
        epoch: The epoch, from 0.
        batches: Number of batches of the epoch that had been handed out.
        length: Number of batches of the epoch, ``None`` if unknown.
        begun: Random states when the epoch began, ``None`` if it hadn't begun.
        generators: States of the loader's own generators when the epoch began, or at the checkpoint if it hadn't begun.
        ahead: A list with the prefetched batch, if reading it again could give another one.
        is_told: True once ``skip_first_batches`` has set the batch at which to resume.
        samples: Number of samples of the epoch handed out on all ranks together.
        ranks: Number of ranks that shared these samples.
        epoch_samples: Number of samples of the dataset, ``None`` if unknown.
        undealt: Number of the sampler's batches that the saved ranks took, skipped before the rest is dealt.
        workers: ``Deal.workers``.
        reuses_workers: True if the epoch reuses the worker processes of an earlier one. torch then draws no seed for
            them from the generator that also draws the order.
        generators_now: States of the loader's own generators at the checkpoint, from which a program draws that goes on
            with another epoch. Empty if the epoch hadn't begun.
        seeds: The seed of each ``SeedableRandomSampler`` of the loader.
    """

    epoch: int
    batches: int = 0
    length: int | None = None
    begun: dict[str, Any] | None = None
    generators: list[torch.Tensor] = dataclasses.field(default_factory=list)
    ahead: list[Any] = dataclasses.field(default_factory=list)
    is_told: bool = False
    samples: int = 0
    ranks: int = 1
    epoch_samples: int | None = None
    undealt: int = 0
    workers: int = 1
    reuses_workers: bool = False
    generators_now: list[torch.Tensor] = dataclasses.field(default_factory=list)
    seeds: list[int] = dataclasses.field(default_factory=list)


class LoaderPosition:
    """The position of a loader, shared with the loaders that skip its first batches.

    Attributes:
        reuses_workers: The value of ``ResumePoint`` for the next epoch of a run that continues from a checkpoint.
            ``None`` in other runs, whose loaders know it themselves.
    """

    def __init__(self, epochs: EpochCounter) -> None:
        self.reuses_workers: bool | None = None
        self.ahead: Any = _NOTHING  # the prefetched batch, where reading it again could give another one
        self.epochs = epochs
        self.resumed: ResumePoint | None = None  # the latest at which an iteration began by itself
        self._latest: LoaderIteration | None = None
        self._begun: Any = None
        self._generators: list[torch.Tensor] = []
        self._reused_workers = False  # by the running epoch
        self._resume_point: ResumePoint | None = None

    @property
    def _running(self) -> LoaderIteration | None:
        """The running iteration, but none that an exception ended and whose traceback keeps it alive."""
        return self._latest if self._latest in ACTIVE_ITERATIONS.running else None

    @property
    def epoch(self) -> int:
        """The epoch that is running, or else the one that comes next."""
        return self.epochs.following if self._running is None else self.epochs.running

    def state_dict(
        self, generators: Sequence[torch.Generator], length: int | None, deal: Deal, *, reuses_workers: bool
    ) -> dict[str, Any]:
        """Return the fields of a ``ResumePoint``, which ``torch.load(weights_only=True)`` reads.

        ``generators`` are the loader's own; ``length`` is the number of batches of an epoch, ``None`` if unknown. The
        next epoch ``reuses_workers`` of an earlier one.
        """
        if self._resume_point is not None:  # loaded, and not iterated since
            return dict(vars(self._resume_point))
        dealt: dict[str, Any] = {"ranks": deal.ranks, "epoch_samples": deal.epoch_samples, "workers": deal.workers}
        running = self._running
        states = [generator.get_state() for generator in generators]
        if running is None:
            dealt["reuses_workers"] = reuses_workers
            return vars(ResumePoint(self.epoch, length=length, generators=states, samples=0, **dealt))
        step = running.counter.step
        return vars(
            ResumePoint(
                self.epoch,
                step,
                running.total,
                begun=self._begun,
                generators=self._generators,
                ahead=[_plain(self.ahead)] if _is_plain(self.ahead) else [],
                samples=deal.samples_after(step, running.loader.sampler_skipped),
                reuses_workers=self._reused_workers,
                generators_now=states,
                **dealt,
            )
        )

    def load_state_dict(
        self, state: dict[str, Any], generators: Sequence[torch.Generator], length: int | None, deal: Deal
    ) -> None:
        """Make the next iteration resume where ``state_dict`` was taken, even with another number of ranks.

        With ``NOTEBOOK_ACCEL_COMPAT=accelerate`` in the environment, the epoch starts over, as with Accelerate.
        """
        saved = ResumePoint(**state)
        self.epochs.following = saved.epoch
        self.reuses_workers = None if environment.follows_accelerate() else saved.reuses_workers
        resume_point = _dealt_anew(saved, length, deal)
        if resume_point is None and saved.batches:
            _warn_of_new_epoch(saved, length, deal)
        begins_anew = resume_point is None or resume_point.begun is None or environment.follows_accelerate()
        self._resume_point = None if begins_anew else resume_point
        _set_states(generators, saved.generators if begins_anew else saved.generators_now or saved.generators)

    def set_epoch(self, epoch: int) -> None:
        """Make ``epoch`` the next one. A resume point in another epoch is dropped."""
        self.epochs.following = epoch
        if self._resume_point is None or self._resume_point.epoch == epoch:
            return
        self._resume_point = None
        if self.reuses_workers is not None:  # the epochs after the saved one reuse its workers
            self.reuses_workers = True

    def go_on(self, current: LoaderIteration) -> None:
        """Record that a loop asks for its next batch, so that a resume point which was loaded inside of it is dropped.

        A resume point that was loaded during the last batch is kept for the next loop. Ranks with different numbers of
        batches decide this by the last one that every rank has.
        """
        if self._resume_point is not None and self._latest is current and not current.ends_window:
            self._resume_point = self.reuses_workers = None
            self.epochs.following = self.epochs.running + 1

    def skip_by_hand(self, num_batches: int) -> None:
        """Record that the program skips batches itself, so that the resumed iteration skips no more.

        Programs count batches over all epochs: zero batches to skip after an epoch's last batch mean the next epoch.
        """
        resume_point = self._resume_point
        if resume_point is None:
            return
        if num_batches == 0 and resume_point.batches == resume_point.length:
            self.set_epoch(resume_point.epoch + 1)
            return
        ahead = resume_point.ahead if num_batches == resume_point.batches else []
        self._resume_point = dataclasses.replace(resume_point, is_told=True, ahead=ahead)

    def take_resume_point(self) -> ResumePoint | None:
        """Return and clear the resume point; ``None`` if the iteration starts a new epoch."""
        resume_point, self._resume_point = self._resume_point, None
        if resume_point is not None:
            self.resumed = None if resume_point.is_told else resume_point
        return resume_point

    @contextlib.contextmanager
    def beginning(
        self, resume_point: ResumePoint | None, generators: Sequence[torch.Generator], *, reuses_workers: bool
    ) -> Iterator[None]:
        """Set the random states from which an iteration draws its order, while its first batch is read."""
        self.ahead = _NOTHING
        self._reused_workers = reuses_workers
        if self.reuses_workers is not None:  # the epochs after this one reuse its workers
            self.reuses_workers = True
        if resume_point is None or resume_point.begun is None:
            self._begun = random_state.snapshot()
            self._generators = [generator.get_state() for generator in generators]
            yield
            return
        now, drawn = random_state.snapshot(), [generator.get_state() for generator in generators]
        random_state.restore(resume_point.begun)
        _set_states(generators, resume_point.generators)
        self._begun = random_state.snapshot()
        self._generators = resume_point.generators
        try:
            yield
        finally:
            random_state.restore(now)
            if resume_point.generators_now:  # the program may have drawn from them since the epoch began
                _set_states(generators, drawn)

    @contextlib.contextmanager
    def running(self, current: LoaderIteration) -> Iterator[None]:
        """Track an iteration while the body runs, and then pass the next epoch on.

        An abandoned iteration may end while the next one is running.
        """
        self._latest = current
        try:
            yield
        finally:
            if self._latest is current:
                self._latest = None
                self.ahead = _NOTHING
                current.pass_epoch_on()


def _set_states(generators: Sequence[torch.Generator], states: Sequence[torch.Tensor]) -> None:
    for generator, its_state in zip(generators, states, strict=False):
        generator.set_state(its_state)


def _dealt_anew(saved: ResumePoint, length: int | None, deal: Deal) -> ResumePoint | None:
    """Convert a position to this run's number of ranks; return ``None`` if the data or its batches differ.

    With another number of ranks, it is the first batch that no saved rank had taken. If several workers read a stream,
    nobody knows how many samples each has yielded.
    """
    if saved.workers != deal.workers:
        return None
    is_alike = saved.ranks == deal.ranks and saved.samples == saved.batches * deal.round_samples
    if is_alike and saved.length == length:
        return saved
    if is_alike or saved.epoch_samples != deal.epoch_samples or deal.workers > 1:
        return None
    here = dataclasses.replace(saved, length=length, ahead=[], ranks=deal.ranks)
    # A rank whose share is shorter than the others' has no batch left while they have.
    is_over = saved.batches == saved.length and saved.samples >= (saved.epoch_samples or 0)
    if is_over and length is not None:
        return dataclasses.replace(here, batches=length, samples=deal.samples_after(length, 0))
    rounds, left = divmod(saved.samples, deal.round_samples)
    if left and deal.batch_samples is not None and not saved.samples % deal.batch_samples:
        taken = saved.samples // deal.batch_samples
        return dataclasses.replace(here, batches=deal.rounds_of(taken), undealt=taken)
    if left:
        _warn(
            f"{left} samples of epoch {saved.epoch} are repeated: the loader had yielded {saved.samples} when it was "
            f"saved, and now yields {deal.round_samples} at a time."
        )
    return dataclasses.replace(here, batches=rounds, samples=saved.samples - left)


def _warn_of_new_epoch(saved: ResumePoint, length: int | None, deal: Deal) -> None:
    if max(saved.workers, deal.workers) > 1:
        _warn(
            f"{saved.ranks} ranks had read a stream with {saved.workers} workers when it was saved, and {deal.ranks} "
            f"ranks read it with {deal.workers} now: it begins epoch {saved.epoch} anew. "
            "Fix: as many ranks, samples in a batch and workers as then, or skip_first_batches"
        )
    else:
        _warn(
            f"A loader had {saved.length} batches when it was saved and has {length} now: it begins epoch "
            f"{saved.epoch} anew. Fix: the same data and batch size, or skip_first_batches"
        )


def _warn(text: str) -> None:
    if process_group.rank_place().rank == 0:
        warnings.warn(text, stacklevel=4)


def _is_plain(tree: Any) -> bool:
    """Return whether ``torch.load(weights_only=True)`` reads ``_plain(tree)``."""
    if type(tree) in (list, tuple, MarkedBatch, Tail):
        return all(map(_is_plain, tree))
    if type(tree) is dict:
        return all(map(_is_plain, tree.values())) and all(type(key) in (str, int) for key in tree)
    return type(tree) in _PLAIN


def _plain(ahead: Any) -> Any:
    if not isinstance(ahead, MarkedBatch):
        return ahead
    return ahead.batch, None if ahead.tail is None else tuple(ahead.tail)
