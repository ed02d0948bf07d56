"""The function that a session launches: each rank runs it to receive requests and carry them out.

It runs in the rank's main thread. Between requests an interrupt has no effect; during a request it is raised in the
user's code. A rank of a detached session serves one kernel after the other: when its kernel has gone, the rank finishes
the request and waits for the next kernel.
"""

from __future__ import annotations

import contextlib
import importlib
import math
import os
import sys
import time
import traceback
import types
from collections.abc import Callable, Iterator
from typing import Any

import msgspec

from notebook_accel import environment, nccl, reporting
from notebook_accel.formatting import clipped
from notebook_accel.launching.ranks import (
    displays,
    failure,
    gathering,
    interruption,
    profiling,
    progress,
    streams,
    worker,
)
from notebook_accel.launching.results import write_result_file
from notebook_accel.launching.spec import JobSpec, Source
from notebook_accel.payload import memory_files, sharded_tensors
from notebook_accel.protocol import events
from notebook_accel.protocol import session_messages as messages
from notebook_accel.protocol.channel import ClosedError, Connection, Message
from notebook_accel.sessions.listener import join_session, read_secret
from notebook_accel.sessions.ranks import torch_state
from notebook_accel.sessions.ranks.namespace import NamespaceTracker, completions, description, share_with_workers
from notebook_accel.sessions.ranks.user_modules import UserModules

_ABORT_PATIENCE_S = 2.0
_MOST_SHOWN_CHARACTERS = 20_000
_BACKWARD = "_engine_run_backward"  # torch's function: in a traceback, it means that gradients were being exchanged
_NEXT_KERNEL_PERIOD_S = 0.3


def serve(folder: str, *, is_detached: bool) -> None:
    """Join the session through its ``folder``, and carry out its requests until it is over.

    When the kernel is gone, ranks of a detached session wait for another one, and others end.
    """
    interruption.defer()
    nccl.let_ranks_survive()
    torch_state.let_cells_make_their_group_again()
    rank = _SessionRank(int(os.environ["RANK"]), folder)
    # A restarted rank joins its session where that is now: the session may have been detached since its launch.
    folder_since = os.environ.pop(environment.SESSION_FOLDER, folder)
    if is_detached or folder_since != folder:
        rank.outlive_kernel(folder_since)
    while True:
        gone = (ConnectionError, FileNotFoundError) if rank.is_detached else (ClosedError,)  # no file: nobody listens
        with contextlib.suppress(*gone):
            hello = messages.Hello(secret=read_secret(rank.folder), rank=rank.rank, kept=rank.hand_over())
            with contextlib.closing(join_session(rank.folder, hello)) as connection:
                rank.serve(connection)
                return
        if not rank.is_detached:
            return
        time.sleep(_NEXT_KERNEL_PERIOD_S)


class _SessionRank:
    def __init__(self, rank: int, folder: str) -> None:
        self.rank = rank
        self.folder = folder
        self.is_detached = False
        self._connection: Connection
        self._kept: messages.RetainedState | None = None  # for the next kernel; ``None`` before the first
        self._namespace = sys.modules["__main__"].__dict__
        self._tracker = NamespaceTracker(self._namespace)
        self._user_modules = UserModules()
        self._pid = os.getpid()
        self._lacks_delivery = False
        self._interrupt_was_late = False  # it has come after the end of the code that it was meant for
        self._traceback: types.TracebackType | None = None  # of the last error in user code
        world_size = int(os.environ["WORLD_SIZE"])
        self._spec = JobSpec(
            name="", world_size=world_size, environment={}, working_directory="", sys_path=[], sources={}
        )
        share_with_workers(self._namespace, self._spec)
        # A DataLoader worker must not hold the connection open. Which one that is changes with the kernel.
        os.register_at_fork(after_in_child=lambda: self._connection.close())  # noqa: PLW0108

    def serve(self, connection: Connection) -> None:
        """Carry out a kernel's requests until the session is over. Raise a ``ClosedError`` when the kernel has gone."""
        self._connection = connection
        while True:
            for message in connection.receive():
                try:
                    request = messages.decode_for_rank(message.body)
                    if isinstance(request, messages.Leave):
                        return
                    if isinstance(request, messages.Welcome):
                        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(request.renewals)
                        self._kept = msgspec.structs.replace(self._kept or _FRESH, renewals=request.renewals)
                    elif not isinstance(request, messages.Input):  # meant for a debugger that has just ended
                        self._answer(request, message)
                finally:
                    for descriptor in message.descriptors:
                        os.close(descriptor)

    def outlive_kernel(self, folder: str) -> None:
        """From now on, wait in this folder for the next kernel when one is gone."""
        self.folder = folder
        self.is_detached = True
        reporting.reporter().send(events.Serving(cell=""))

    def hand_over(self) -> messages.RetainedState | None:
        """Return the state that the next kernel needs; ``None`` before the first kernel."""
        if self._kept is None:
            return None
        own, sent = self._tracker.hand_over()
        return msgspec.structs.replace(self._kept, own=own, sent=sent)

    def _record(self, request: Any, fields: dict[str, Any]) -> None:
        """Record a request's outcome for the next kernel, in case the present one dies before the reply arrives."""
        assert self._kept is not None
        group = self._kept.group
        if isinstance(request, (messages.InspectGroup, messages.RenewGroup)):
            group = "broken" if group == "broken" and isinstance(request, messages.InspectGroup) else "sound"
        elif "failed" in fields:
            group = "broken" if group == "broken" or fields["breaks_group"] else "unchecked"
        renewals = getattr(request, "renewals", self._kept.renewals)
        self._kept = msgspec.structs.replace(self._kept, requests=request.number, renewals=renewals, group=group)
        if type(request) in _USER_CODE:
            failed = fields.get("failed")
            if failed is not None:
                failed = msgspec.structs.replace(failed, exception=b"")  # the exception may have large values
            self._kept = msgspec.structs.replace(self._kept, failed=failed, title=_title(request))

    def _answer(self, request: Any, message: Message) -> None:
        def act() -> dict[str, Any]:
            begun_ns = time.time_ns()
            try:
                sys.path += [folder for folder in request.import_path if folder not in sys.path]
                call = self._open_delivery(request, message)
                return _HANDLERS[type(request)](self, request) if call is None else self._call(request, call)
            finally:
                self._user_modules.note(since_ns=begun_ns)

        with self._serving(request), contextlib.ExitStack() as opened:
            descriptors: list[int] = []
            # True until the delivery is opened, since an interrupt may come before that.
            self._lacks_delivery = getattr(request, "delivery", None) is not None
            fields = self._run(request, act)
            if fields.get("breaks_group"):  # a GPU kernel may wait in the group for ever
                nccl.abort_soon(_ABORT_PATIENCE_S)
                reporting.reporter().forget_unread()
            if "values" in fields:
                fields, descriptors = self._sealed(fields, opened)
            self._record(request, fields)
            streams.flush()
            reply = messages.Reply(
                number=request.number,
                lacks_delivery=self._lacks_delivery,
                own=self._tracker.own(),
                deleted=self._tracker.deleted(),
                released=self._tracker.hold(),
                log_bytes=streams.log_bytes(),
                steps=reporting.reporter().catch_up(),
                **fields,
            )
            self._connection.send(messages.encode(reply), descriptors)

    @contextlib.contextmanager
    def _serving(self, request: Any) -> Iterator[None]:
        """Report the request that a rank of a detached session serves, for readers of the journal."""
        if not self.is_detached or type(request) not in _USER_CODE:
            yield
            return
        reporting.reporter().send(events.Serving(cell=_title(request)))
        try:
            yield
        finally:
            reporting.reporter().send(events.Serving(cell=""))

    def _run(self, request: Any, act: Callable[[], dict[str, Any]]) -> dict[str, Any]:
        """Carry out a request. Interrupts that arrived after it was sent are raised in the user's code."""
        modes = torch_state.Modes()
        try:
            # An interrupt may have been sent before a Settle and be handled here after it was sent.
            before_s = math.inf if isinstance(request, messages.Settle) else request.sent_s
            self._interrupt_was_late = interruption.discard_deferred(before_s)
            if type(request) in _INTERRUPTIBLE:
                interruption.allow()
            fields = act()
            interruption.defer()
        except BaseException as raised:  # noqa: BLE001 - KeyboardInterrupt and SystemExit of the user's code too
            error = failure.readable(raised)
            if os.getpid() != self._pid:
                failure.end_fork(error, self._spec)
            error = interruption.prefer_interrupt(error)
            if isinstance(error, KeyboardInterrupt):
                modes.restore()
            fields = self._failed(error)
            del error  # its traceback has this frame, and the cycle would keep the user's tensors alive
        if os.getpid() != self._pid:
            failure.end_fork(None, self._spec)
        return fields

    def _failed(self, error: BaseException) -> dict[str, Any]:
        if isinstance(error, SystemExit) and error.code in (None, 0):
            return {}
        tb = failure.without_our_frames(error.__traceback__)
        if tb is not None:  # kept for the debugger until the next error, as IPython does in the notebook
            sys.last_type, sys.last_value, sys.last_traceback = type(error), error, tb
            self._traceback = tb
        failed = failure.describe(error, self._spec, self._tracker.definitions)
        frames = traceback.walk_tb(error.__traceback__)
        breaks = isinstance(error, KeyboardInterrupt) or failed.lost_peer
        fields = {
            "failed": failed,
            "missing": getattr(error, "name", None) or "" if isinstance(error, NameError) else "",
            "breaks_group": breaks or any(frame.f_code.co_name == _BACKWARD for frame, _ in frames),
        }
        if isinstance(error, (MemoryError, RuntimeError)):
            memory = importlib.import_module("notebook_accel.utils.memory")  # not at the top: it needs torch
            if memory.should_reduce_batch_size(error):
                _clear_frames(error)  # or the next attempt, with smaller batches, lacks the same memory
        return fields

    def _sealed(self, fields: dict[str, Any], opened: contextlib.ExitStack) -> tuple[dict[str, Any], list[int]]:
        values, gathered = fields.pop("values"), fields.pop("gathered", None) or gathering.Gathered()
        try:
            descriptor = memory_files.memory_file("notebook-accel-value")
            opened.callback(os.close, descriptor)
            write_result_file(
                descriptor,
                values,
                rank=self.rank,
                origins=self._tracker.definitions,
                advice="take something else of it, such as numbers, tensors or a state_dict()",
                wholes=gathered.wholes,
                refused=gathered.refused,
            )
        except Exception as error:  # noqa: BLE001 - any error is reported as the reason why there is no value
            return {**fields, **self._failed(error)}, []
        return fields, [descriptor]

    # Requests -----------------------------------------------------------------------------------------------------

    def _open_delivery(self, request: Any, message: Message) -> Any:
        """Bind the names that came with a request. Return its function call, if it has one."""
        if not self._lacks_delivery:
            return None
        if not message.is_whole:
            raise OSError("this rank has no room for another open file")
        with interruption.deferred():  # an interrupt must not leave half of the names bound
            self._show_sources(request.delivery.sources)
            call = self._tracker.take(request.delivery, message.descriptors[0])
            self._lacks_delivery = False
        return call

    def _show_sources(self, sources: dict[str, tuple[str, str]]) -> None:
        new = {filename: Source(label, text) for filename, (label, text) in sources.items()}
        self._spec.sources.update(new)
        worker.show_sources(new)

    def _execute(self, request: messages.Execute) -> dict[str, Any]:
        self._show_sources({request.label: (request.label, request.source)})
        self._user_modules.follow(reloads=request.reloads)
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
            with contextlib.suppress(ClosedError):  # the cell goes on without its kernel
                self._connection.send(messages.encode(messages.Displayed(number=number, display=event)))

        displays.redirect(show)
        self._tracker.let_go()
        reporting.reporter().stage = 2 * number
        try:
            with progress.PROGRESS.count_cell():
                yield
            displays.end()
            reporting.reporter().stage = 2 * number + 1
        finally:
            displays.redirect(None)
            profiling.PROFILER.end("the cell ended", is_final=False)

    def _pull(self, request: messages.Pull) -> dict[str, Any]:
        values = {name: self._namespace[name] for name in request.names if name in self._namespace}
        is_answering = self.rank in request.answering
        gathered = gathering.Gathered()
        if request.gathers:  # before any error is raised, since the other ranks wait for this rank's shards
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

    def _count_as_pulled(self, request: messages.CountAsPulled) -> dict[str, Any]:
        return {"lines": self._tracker.count_as_pulled(request.numbers)}

    def _look_up(self, request: messages.LookUp) -> dict[str, Any]:
        answer = description if request.describes else completions
        return {"lines": answer(self._namespace, request.text)}

    def _debug(self, request: messages.Debug) -> dict[str, Any]:
        if self._traceback is None:
            return {"lines": [f"Nothing has failed on rank {self.rank} yet, so there is nothing to debug."]}
        debugging = importlib.import_module("notebook_accel.sessions.ranks.debugging")
        debugging.post_mortem(self._traceback, self.rank, lambda text: self._ask_user(request.number, text))
        return {}

    def _ask_user(self, number: int, text: str) -> str:
        """Send the user a prompt and return the line that they type; empty if the kernel has gone."""
        streams.flush()
        prompt = messages.Prompt(number=number, text=text, log_bytes=streams.log_bytes())
        with contextlib.suppress(ClosedError):
            self._connection.send(messages.encode(prompt))
            while True:
                for message in self._connection.receive():
                    request = messages.decode_for_rank(message.body)
                    if isinstance(request, messages.Input) and request.number == number:
                        return request.line
        return ""

    def _settle(self, _request: messages.Settle) -> dict[str, Any]:
        return {"lines": ["late"] if self._interrupt_was_late else []}

    def _inspect_group(self, _request: messages.InspectGroup) -> dict[str, Any]:
        _import_training("loader_position").ACTIVE_ITERATIONS.abandon()
        return {"group_calls": _import_training("backends.group_recovery").collective_counts()}

    def _renew_group(self, request: messages.RenewGroup) -> dict[str, Any]:
        recovery = _import_training("backends.group_recovery")
        return {"lines": recovery.renew_group(request.renewals, rejoins=request.rejoins, namespace=self._namespace)}

    def _detach(self, request: messages.Detach) -> dict[str, Any]:
        if request.folder:
            self.outlive_kernel(request.folder)
        else:
            self.is_detached = False
        return {}


_HANDLERS: dict[type, Callable[..., dict[str, Any]]] = {  # of requests other than calls
    messages.Execute: _SessionRank._execute,
    messages.Push: lambda *_: {},  # the delivery has done the work
    messages.Pull: _SessionRank._pull,
    messages.CountAsPulled: _SessionRank._count_as_pulled,
    messages.LookUp: _SessionRank._look_up,
    messages.Debug: _SessionRank._debug,
    messages.InspectGroup: _SessionRank._inspect_group,
    messages.Settle: _SessionRank._settle,
    messages.RenewGroup: _SessionRank._renew_group,
    messages.Detach: _SessionRank._detach,
}

_USER_CODE = {messages.Execute, messages.Call, messages.Pull, messages.Debug}
_INTERRUPTIBLE = {*_USER_CODE, messages.RenewGroup}
_FRESH = messages.RetainedState(own=[], sent=[], requests=0, renewals=0, group="sound", failed=None, title="")


def _title(request: Any) -> str:
    """Return a request in words, such as ``In[7]`` or ``a pull``."""
    return getattr(request, "label", "") or f"a {type(request).__name__.lower()}"


def _import_training(module: str) -> Any:
    """Import a module that needs torch. Not at the top: the kernel imports this module, and must not import torch."""
    return importlib.import_module(f"notebook_accel.training.{module}")


def _clear_frames(error: BaseException) -> None:
    """Let go of the variables of the frames of an error, and of the errors that it followed."""
    known: set[int] = set()
    following: BaseException | None = error
    while following is not None and id(following) not in known:
        known.add(id(following))
        traceback.clear_frames(following.__traceback__)
        following = following.__cause__ or following.__context__


def _bundle(value: Any) -> dict[str, str]:
    """Return a value's mime bundle, with long text cut off."""
    data = displays.sendable(displays.bundle_of(value)[0])
    data["text/plain"] = clipped(data["text/plain"], _MOST_SHOWN_CHARACTERS) + sharded_tensors.note_on(value)
    return {kind: shown for kind, shown in data.items() if isinstance(shown, str)}
