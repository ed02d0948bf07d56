"""The function that a session launches: each rank runs it to receive requests and carry them out.

It runs in the rank's main thread. Between requests an interrupt has no effect; during one it is raised in the user's
code.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import os
import sys
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

from notebook_accel import nccl, reporting
from notebook_accel.formatting import clipped
from notebook_accel.launching.ranks import displays, failure, gathering, interruption, loops, profiling, streams, worker
from notebook_accel.launching.results import write_result_file
from notebook_accel.launching.spec import JobSpec, Source
from notebook_accel.payload import memory_files, sharded_tensors
from notebook_accel.protocol import events
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, Message
from notebook_accel.sessions.listener import join_session
from notebook_accel.sessions.ranks.namespace import NamespaceTracker, completions, description

_ABORT_PATIENCE_S = 2.0
_MOST_SHOWN_CHARACTERS = 20_000
_BACKWARD = "_engine_run_backward"  # torch's function, in a traceback: gradients were on their way to other ranks
_DEVICES = ("cpu", "cuda")  # device types with an autocast of their own


def serve(folder: str, secret: bytes) -> None:
    """Join the session and carry out its requests, until it is over or its kernel is gone."""
    interruption.defer()
    nccl.let_ranks_survive()
    _let_cells_make_their_group_again()
    rank = int(os.environ["RANK"])
    with contextlib.closing(join_session(folder, messages.Hello(secret=secret, rank=rank))) as connection:
        os.register_at_fork(after_in_child=connection.close)  # a DataLoader worker must not hold the connection open
        with contextlib.suppress(ClosedError):
            _SessionRank(rank, connection).serve()


def _let_cells_make_their_group_again() -> None:
    """Let a cell that makes the default process group run again: the group that is there serves it.

    This holds for calls with the arguments of the call that made the group. torch refuses all others.
    """
    distributed: Any = importlib.import_module("torch.distributed")
    if not distributed.is_available():  # as in some builds for macOS
        return
    make_group = distributed.init_process_group
    made_with: list[Any] = []

    @functools.wraps(make_group)
    def init_process_group(*args: Any, **kwargs: Any) -> None:
        if not (distributed.is_initialized() and made_with == [args, kwargs]):
            make_group(*args, **kwargs)
            made_with[:] = args, kwargs

    distributed.init_process_group = init_process_group


class _SessionRank:
    def __init__(self, rank: int, connection: Connection) -> None:
        self._rank = rank
        self._connection = connection
        self._namespace = sys.modules["__main__"].__dict__
        self._tracker = NamespaceTracker(self._namespace)
        self._pid = os.getpid()
        self._lacks_delivery = False
        self._traceback: types.TracebackType | None = None  # of the last error in user code
        world_size = int(os.environ["WORLD_SIZE"])
        self._spec = JobSpec(
            name="", world_size=world_size, environment={}, working_directory="", sys_path=[], sources={}
        )

    def serve(self) -> None:
        while True:
            for message in self._connection.receive():
                try:
                    request = messages.for_rank.decode(message.body)
                    if isinstance(request, messages.Welcome):
                        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(request.renewals)
                    elif not isinstance(request, messages.Input):  # meant for a debugger that has just ended
                        self._answer(request, message)
                finally:
                    for descriptor in message.descriptors:
                        os.close(descriptor)

    def _answer(self, request: Any, message: Message) -> None:
        do = _HANDLERS[type(request)]
        with contextlib.ExitStack() as opened:
            descriptors: list[int] = []
            # True until the delivery is opened, since an interrupt may come before that.
            self._lacks_delivery = getattr(request, "delivery", None) is not None
            fields = self._run(
                lambda: do(self, request, self._open_delivery(request, message)),
                request.sent_s,
                type(request) in _INTERRUPTIBLE,
            )
            if fields.get("breaks_group"):  # a GPU kernel may wait in the group for ever
                nccl.abort_soon(_ABORT_PATIENCE_S)
                reporting.reporter().forget_unread()
            if "values" in fields:
                fields, descriptors = self._sealed(fields, opened)
            bound, unbound = self._tracker.changes()
            streams.flush()
            reply = messages.Reply(
                number=request.number,
                lacks_delivery=self._lacks_delivery,
                bound=bound,
                unbound=unbound,
                log_bytes=streams.log_bytes(),
                steps=reporting.reporter().catch_up(),
                **fields,
            )
            self._connection.send(messages.encode(reply), descriptors)

    def _run(self, act: Callable[[], dict[str, Any]], sent_s: float, is_interruptible: bool) -> dict[str, Any]:
        """Carry out a request. Interrupts that arrived since it was sent are raised in the user's code."""
        modes = _TorchModes()
        try:
            interruption.discard_deferred(sent_s)
            if is_interruptible:
                interruption.allow()
            fields = act()
            interruption.defer()
        except BaseException as raised:  # noqa: BLE001 - KeyboardInterrupt and SystemExit of the user's code too
            if os.getpid() != self._pid:
                failure.end_fork(raised, self._spec)
            error = interruption.prefer_interrupt(raised)
            if isinstance(error, KeyboardInterrupt):
                modes.restore()
            fields = self._failed(error)
        if os.getpid() != self._pid:
            failure.end_fork(None, self._spec)
        return fields

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return {}
        self._keep(error)
        failed = failure.describe(error, self._spec, self._tracker.definitions)
        frames = traceback.walk_tb(error.__traceback__)
        breaks = isinstance(error, KeyboardInterrupt) or failed.lost_peer
        return {
            "failed": failed,
            "missing": getattr(error, "name", None) or "" if isinstance(error, NameError) else "",
            "breaks_group": breaks or any(frame.f_code.co_name == _BACKWARD for frame, _ in frames),
        }

    def _keep(self, error: BaseException) -> None:
        """Keep an error and its frames for the debugger until the next one, as IPython does in the notebook."""
        tb = failure.without_our_frames(error.__traceback__)
        if tb is not None:
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
            self._traceback = tb

    def _sealed(self, fields: dict[str, Any], opened: contextlib.ExitStack) -> tuple[dict[str, Any], list[int]]:
        values, gathered = fields.pop("values"), fields.pop("gathered", None) or gathering.Gathered()
        try:
            descriptor = memory_files.memory_file("notebook-accel-value")
            opened.callback(os.close, descriptor)
            write_result_file(
                descriptor,
                values,
                rank=self._rank,
                origins=self._tracker.definitions,
                advice="take something else of it, such as numbers, tensors or a state_dict()",
                wholes=gathered.wholes,
                refused=gathered.refused,
            )
        except Exception as error:  # noqa: BLE001 - whatever it is, it is why the value can't be had
            return {**fields, **self._failed(error)}, []
        return fields, [descriptor]

    # Requests -----------------------------------------------------------------------------------------------------

    def _open_delivery(self, request: Any, message: Message) -> Any:
        """Bind the names that came with a request. Return the call that came with it, if any."""
        if not self._lacks_delivery:
            return None
        if not message.is_whole:
            raise OSError("this rank has no room for another open file")
        with interruption.deferred():  # all of it arrives, or nothing
            self._show_sources(request.delivery.sources)
            call = self._tracker.take(request.delivery, message.descriptors[0])
            self._lacks_delivery = False
        return call

    def _show_sources(self, sources: dict[str, tuple[str, str]]) -> None:
        new = {filename: Source(label, text) for filename, (label, text) in sources.items()}
        self._spec.sources.update(new)
        worker.show_sources(new)

    def _execute(self, request: messages.Execute, _: None) -> dict[str, Any]:
        self._show_sources({request.label: (request.label, request.source)})
        with self._displaying(request.number):
            value = worker.run_cell(request.source, request.label, self._namespace)
        fields: dict[str, Any] = {"shown": {} if value is None else _bundle(value)}
        if value is not None:
            self._namespace["_"] = value
        if request.wants_value:
            fields["values"] = {"": value}
        return fields

    def _call(self, request: messages.Call, call: tuple[Callable[..., Any], Any, Any]) -> dict[str, Any]:
        function, args, kwargs = call
        with self._displaying(request.number):
            value = function(*args, **kwargs)
        return {"values": {"": value}}

    @contextlib.contextmanager
    def _displaying(self, number: int) -> Iterator[None]:
        """Send the body's displays, and the figures that it leaves open, to the cell."""

        def show(event: events.Display) -> None:
            self._connection.send(messages.encode(messages.Displayed(number=number, display=event)))

        displays.redirect(show)
        try:
            with loops.loops().count_cell():
                yield
            displays.end()
        finally:
            displays.redirect(None)
            profiling.profiler().end("the cell ended", is_final=False)

    def _pull(self, request: messages.Pull, _: None) -> dict[str, Any]:
        values = {name: self._namespace[name] for name in request.names if name in self._namespace}
        is_answering = self._rank in request.answering
        gathered = gathering.Gathered()
        if request.gathers:  # before an error: the others wait for what this rank has
            gathered = gathering.gather(
                values,
                kept=values if is_answering else (),
                occasion=f"request {request.number}",
                origins=self._tracker.definitions,
            )
        else:
            why = "all ranks have to take part, and not all are alive"
            gathered.refused = gathering.refuse(values, why, self._tracker.definitions)
        if not is_answering:
            return {}
        for name in request.names:
            if name not in values:
                raise NameError(f"name {name!r} is not defined", name=name)
        return {"values": values, "gathered": gathered}

    def _look_up(self, request: messages.LookUp, _: None) -> dict[str, Any]:
        answer = description if request.describes else completions
        return {"lines": answer(self._namespace, request.text)}

    def _debug(self, request: messages.Debug, _: None) -> dict[str, Any]:
        if self._traceback is None:
            return {"lines": [f"Nothing has failed on rank {self._rank} yet, so there is nothing to debug."]}
        debugging = importlib.import_module("notebook_accel.sessions.ranks.debugging")
        debugging.post_mortem(self._traceback, self._rank, lambda text: self._ask_user(request.number, text))
        return {}

    def _ask_user(self, number: int, text: str) -> str:
        """Send the user this text, and return the line that they type."""
        streams.flush()
        prompt = messages.Prompt(number=number, text=text, log_bytes=streams.log_bytes())
        self._connection.send(messages.encode(prompt))
        while True:
            for message in self._connection.receive():
                request = messages.for_rank.decode(message.body)
                if isinstance(request, messages.Input) and request.number == number:
                    return request.line

    def _inspect_group(self, _request: messages.InspectGroup, _: None) -> dict[str, Any]:
        _import_training("loader_position").ACTIVE_ITERATIONS.abandon()
        return {"group_calls": _import_training("backends.group_recovery").collective_counts()}

    def _renew_group(self, request: messages.RenewGroup, _: None) -> dict[str, Any]:
        recovery = _import_training("backends.group_recovery")
        return {"lines": recovery.renew_group(request.renewals, rejoins=request.rejoins, namespace=self._namespace)}


_HANDLERS: dict[type, Any] = {
    messages.Execute: _SessionRank._execute,
    messages.Call: _SessionRank._call,
    messages.Push: lambda *_: {},  # its delivery is all of it
    messages.Pull: _SessionRank._pull,
    messages.LookUp: _SessionRank._look_up,
    messages.Debug: _SessionRank._debug,
    messages.InspectGroup: _SessionRank._inspect_group,
    messages.Settle: lambda *_: {},
    messages.RenewGroup: _SessionRank._renew_group,
}

_INTERRUPTIBLE = {messages.Execute, messages.Call, messages.Pull, messages.Debug, messages.RenewGroup}


def _import_training(module: str) -> Any:
    """Import a module that needs torch, only in a rank: the kernel imports the present module, and no torch."""
    return importlib.import_module(f"notebook_accel.training.{module}")


class _TorchModes:
    """Grad mode and autocast of this thread, as they are now; nothing where torch hasn't been imported.

    An interrupt may come in the middle of a context's exit and leave its mode on. A rank without gradients, or with
    autocast on cached weights, would be useless from then on without anybody noticing.
    """

    def __init__(self) -> None:
        self._torch: Any = sys.modules.get("torch")
        if self._torch is not None:
            self._has_gradients = self._torch.is_grad_enabled()
            self._autocast = [self._torch.is_autocast_enabled(device) for device in _DEVICES]
            self._nesting = self._autocast_nesting()

    def restore(self) -> None:
        if self._torch is None:
            return
        self._torch.set_grad_enabled(self._has_gradients)
        for device, was_enabled in zip(_DEVICES, self._autocast, strict=True):
            self._torch.set_autocast_enabled(device, was_enabled)
        for _ in range(self._autocast_nesting() - self._nesting):
            self._torch.autocast_decrement_nesting()
        if self._nesting == 0:
            self._torch.clear_autocast_cache()

    def _autocast_nesting(self) -> int:
        """Return the depth of nested autocasts. The end of the outermost one clears the weight cache."""
        self._torch.autocast_increment_nesting()
        return int(self._torch.autocast_decrement_nesting())


def _bundle(value: Any) -> dict[str, str]:
    """Return a value's mime bundle, with long text cut off."""
    data = displays.sendable(displays.bundle_of(value)[0])
    data["text/plain"] = clipped(data["text/plain"], _MOST_SHOWN_CHARACTERS) + sharded_tensors.note_on(value)
    return {kind: shown for kind, shown in data.items() if isinstance(shown, str)}
