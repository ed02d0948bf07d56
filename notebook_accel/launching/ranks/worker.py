"""One rank, from a fork of the template to the end of the user's code. This module runs in the forked process."""

from __future__ import annotations

import ast
import builtins
import contextlib
import ctypes
import dataclasses
import faulthandler
import functools
import gc
import importlib
import importlib.machinery
import linecache
import os
import select
import signal
import sys
import types
from collections.abc import Mapping, Sequence
from typing import Any

import msgspec

from notebook_accel import code_places, environment, host_memory, reporting
from notebook_accel.environment import RankPlace
from notebook_accel.errors import PayloadError
from notebook_accel.launching import loggers, torch_settings
from notebook_accel.launching.processes import arm_stacks, set_title
from notebook_accel.launching.ranks import (
    displays,
    failure,
    finished_peers,
    gathering,
    interruption,
    ipython_shims,
    leaving,
    profiling,
    progress,
    random_numbers,
    store,
    streams,
    torch_hooks,
    tracker_runs,
    warning_filters,
)
from notebook_accel.launching.ranks.import_hooks import when_imported
from notebook_accel.launching.results import write_result_file
from notebook_accel.launching.spec import JobSpec, Source
from notebook_accel.payload import memory_files, serialization
from notebook_accel.protocol import agent_messages as messages
from notebook_accel.protocol import events
from notebook_accel.protocol.channel import ClosedError, Connection

_SEND_DEADLINE_S = 30.0
# If memory runs out, the system kills the process that uses most. Ranks count as using 10 % of the memory more, so that
# they are killed before the kernel, the agent and the template, whose end would end every run.
_OOM_SCORE = 100
# Variables for the number of threads. Libraries without a variable of their own read the first.
_THREADS = ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS")
_INTERFACES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_SEND_OTHERS = "return something else, such as numbers, tensors or a state_dict(); or nothing"
NAMESPACE_VARIABLE = "NOTEBOOK_ACCEL_NAMESPACE"


@dataclasses.dataclass
class Target:
    """The content of a payload: the notebook variables that the code uses, and the call.

    Attributes:
        names: Notebook variables and their values, for the rank's ``__main__``.
        function: The function to call; ``None`` if the code is a cell.
        args: Its positional arguments.
        kwargs: Its keyword arguments.
        submodules: Modules to import, since the code reaches them as attributes of their packages.
    """

    names: dict[str, Any]
    function: Any = None
    args: tuple[Any, ...] = ()
    kwargs: dict[str, Any] = dataclasses.field(default_factory=dict)
    submodules: tuple[str, ...] = ()


@dataclasses.dataclass(frozen=True)
class Inherited:
    """The target of ranks that are forks of the kernel, and so have its objects without a payload.

    Results refer to the notebook's functions and classes by their index in ``by_value``.
    """

    target: Target
    by_value: tuple[Any, ...]


def run(order: messages.Fork, descriptors: list[int], inherited: Inherited | None = None) -> int:
    """Run one rank and return its exit status. ``descriptors`` are those of the order."""
    files = messages.RankFiles(*descriptors)
    inherited_modules = len(sys.modules)
    leaving.begin()
    streams.redirect(files.log)
    arm_stacks(files.dump)
    _reset_process()
    spec = JobSpec.decode(memory_files.read_head(files.payload))
    if spec.authkey:
        importlib.import_module("multiprocessing").current_process().authkey = spec.authkey
    if spec.is_detached:
        _show_name(order.place, spec.name)
    link = Connection.from_descriptor(files.connection)
    link.set_send_deadline(_SEND_DEADLINE_S)
    reporter = reporting.connect(link)
    random_numbers.seed_alike(spec.nonce, order.place)
    profiling.PROFILER.start()
    _take_messages(link, order.place)
    os.register_at_fork(after_in_child=link.close)  # a worker of this rank must not hold the connection open
    _keep_garbage_from_forks()
    last, status = _run_user_code(spec, order, files, inherited)
    streams.flush()
    reporter.has_failed = status != 0
    reporter.close()
    if status != 0:
        reporter.send_memory()  # a lack of memory may be the reason
    reporter.send(last)
    if status == 0:
        _wait_for_release(link)
    leaving.leave(is_waited_for=status == 0, inherited_modules=inherited_modules)
    return status


def _show_name(place: RankPlace, run_name: str) -> None:
    """Make ``ps`` and ``nvidia-smi`` show this process as a rank of a detached run."""
    set_title(f"notebook-accel rank {place.rank} of {run_name}")


def _take_messages(link: Connection, place: RankPlace) -> None:
    """Make the reporter's thread handle the agent's messages, until the rank's code ends."""
    poll = select.poll()
    poll.register(link.fileno(), select.POLLIN)
    has_ended = False

    def look() -> None:
        nonlocal has_ended
        try:
            while not has_ended and poll.poll(0):
                for message in link.receive():
                    said = messages.decode_for_rank(message.body)
                    if isinstance(said, messages.Profile):
                        profiling.PROFILER.take(said)
                    elif isinstance(said, messages.Named):
                        _show_name(place, said.name)
                    else:
                        finished_peers.FINISHED_PEERS.take(said.ranks)
        except (ClosedError, msgspec.MsgspecError):  # the agent has gone, or releases this rank
            has_ended = True

    reporting.reporter().before_sample.append(look)


def _keep_garbage_from_forks() -> None:
    """Keep forks of this rank, such as DataLoader workers, from destroying garbage from before the fork.

    The garbage may include a gloo process group, for example after an interrupt. Its destruction in the fork waits for
    threads that only the rank has, or crashes (``ProcessGroupGloo::~ProcessGroupGloo`` of torch 2.13).
    """
    was_enabled: list[bool] = []

    def pause() -> None:
        was_enabled.append(gc.isenabled())
        gc.disable()  # until the fork has frozen the garbage, since code before that may start a collection

    def go_on() -> None:
        if was_enabled.pop():
            gc.enable()

    def freeze() -> None:
        gc.freeze()
        go_on()

    os.register_at_fork(before=pause, after_in_parent=go_on, after_in_child=freeze)


def _run_user_code(
    spec: JobSpec, order: messages.Fork, files: messages.RankFiles, inherited: Inherited | None
) -> tuple[events.Event, int]:
    """Run the user's code and send its value. Return the rank's last event and its exit status."""
    rank_pid = os.getpid()
    by_value: Sequence[Any] = ()
    try:
        _join_run(spec, order, files.store)
        namespace, target, by_value = _open_target(spec, order.place.rank, files.payload, inherited)
        # Not before: what the notebook has imported before it set a filter is imported before that here too.
        warning_filters.take_over(spec.warning_filters)
        try:
            value = call(spec, target, namespace)
        finally:
            displays.end()
        if os.getpid() != rank_pid:
            failure.end_fork(None, spec)
        finish_background_work()
        _send(value, spec, order.place, files.result, namespace, by_value)
        interruption.defer()
    except BaseException as raised:  # noqa: BLE001 - KeyboardInterrupt and SystemExit of the user's code too
        error = failure.readable(raised)
        if os.getpid() != rank_pid:
            failure.end_fork(error, spec)
        error = finished_peers.FINISHED_PEERS.explain(interruption.prefer_interrupt(error))
        saved = order.place.local_rank == 0 and _save_pulled(spec, files.result, order.place.rank, by_value)
        return failure.describe(error, spec, by_value, saved=saved), 1
    return events.Finished(), 0


def _join_run(spec: JobSpec, order: messages.Fork, listening: int | None) -> None:
    """Become the rank of this order: set its environment, join the ranks' store, and report the start."""
    interruption.watch(order.place.master_port)
    _set_environment(spec, order.place, order.variables)
    tracker_runs.install(order.place, spec.name)
    if listening is not None:
        store.serve(order.place, listening)
    store.join()
    interruption.allow()  # not before: threads started until now inherit the blocked SIGINT
    node = int(order.variables.get("GROUP_RANK", "0"))
    reporting.reporter().send(events.Started(pid=os.getpid(), node=node))


def _open_target(
    spec: JobSpec, rank: int, payload: int, inherited: Inherited | None
) -> tuple[dict[str, Any], Target, Sequence[Any]]:
    """Return the names of ``__main__``, the target, and the objects to which results refer by their index."""
    if inherited is not None:
        show_sources(spec.sources)
        return _stay_main(rank), inherited.target, inherited.by_value
    namespace = _become_main(payload, rank)
    opened = open_namespace(spec, payload, namespace)
    return namespace, opened.value, [obj for _, obj in opened.by_value]


def _send(
    value: Any, spec: JobSpec, place: RankPlace, result: int, namespace: dict[str, Any], by_value: Sequence[Any]
) -> None:
    """Write the rank's value and, on each machine's first rank, the names to be pulled."""
    pulled, absent = _look_up_all(namespace, spec.pull, place.rank)
    values = {"": value, **(pulled if place.local_rank == 0 else {})}
    # Every rank has a share of a sharded model, so all of them help to gather the values that the first ones send.
    gathered = gathering.gather({"": value, **pulled}, kept=values, occasion="end", origins=by_value)
    refused = gathered.refused | (absent if place.local_rank == 0 else {})
    write_result_file(
        result,
        values,
        rank=place.rank,
        origins=by_value,
        advice=_SEND_OTHERS,
        wholes=gathered.wholes,
        refused=refused,
    )


def _save_pulled(spec: JobSpec, result: int, rank: int, by_value: Sequence[Any]) -> bool:
    """Save the names to be pulled after a failure, as a cell of the notebook would leave them."""
    pulled, _ = _look_up_all(sys.modules["__main__"].__dict__, spec.pull, rank)
    if not pulled:
        return False
    with contextlib.suppress(Exception):  # the failure that is being reported matters more
        refused = gathering.refuse(pulled, "all ranks have to take part, and the run has failed", by_value)
        return write_result_file(result, pulled, rank=rank, origins=by_value, advice=_SEND_OTHERS, refused=refused) > 0
    return False


def _look_up_all(
    namespace: dict[str, Any], names: Sequence[str], rank: int
) -> tuple[dict[str, Any], dict[str, PayloadError]]:
    """Return the values of the names that exist, and an error for each missing name."""
    found: dict[str, Any] = {}
    absent: dict[str, PayloadError] = {}
    for name in names:
        try:
            found[name] = look_up(namespace, name)
        except NameError as error:
            absent[name] = PayloadError(str(error), path=f'name "{name}" of rank {rank}')
    return found, absent


def look_up(namespace: dict[str, Any], name: str) -> Any:
    """Return the value of a name to be pulled.

    Raises:
        NameError: There is no such name. The message names ``--pull``.
    """
    try:
        return namespace[name]
    except KeyError:
        raise NameError(
            f"--pull {name}: rank 0 has no name {name!r} when the cell has ended. Fix: assign it in the cell", name=name
        ) from None


def open_namespace(spec: JobSpec, payload: int, namespace: dict[str, Any]) -> serialization.Opened:
    """Fill a ``__main__`` with the notebook's variables, and the functions and classes that they use."""
    show_sources(spec.sources)
    opened = serialization.load(payload, namespace=namespace)
    namespace.update({name: obj for name, obj in opened.by_value if name is not None})
    namespace.update(opened.value.names)
    for name in opened.value.submodules:
        with contextlib.suppress(ImportError):  # the code will fail where it needs the module
            importlib.import_module(name)
    return opened


def show_sources(sources: Mapping[str, Source]) -> None:
    """Make tracebacks show the source of code that is in no file."""
    for filename, source in sources.items():
        # Without a modification time linecache never looks for a file of that name.
        linecache.cache[filename] = (len(source.text), None, source.text.splitlines(keepends=True), filename)
    code_places.name_files({filename: source.label for filename, source in sources.items()})


def _reset_process() -> None:
    """Undo the template's process settings that a rank must not have."""
    for number in (signal.SIGTERM, signal.SIGCONT):
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGTERM})
    # A sandbox may hide the file.
    with contextlib.suppress(OSError, ValueError), open("/proc/self/oom_score_adj", "r+") as score:
        score.write(str(min(1000, int(score.read()) + _OOM_SCORE)))
    faulthandler.enable(2, all_threads=False)  # shows the Python line of a crash in native code
    sys.argv = ["cell.py"]


def _set_environment(spec: JobSpec, place: RankPlace, variables: Mapping[str, str]) -> None:
    # An interface that the user has named wins, for connections between nodes.
    named = {name: spec.environment[name] for name in _INTERFACES if name in variables and name in spec.environment}
    own = {**place.variables(), **store.VARIABLES, **variables, **named}
    everything = {"NCCL_SOCKET_IFNAME": "lo", **spec.environment, **own}
    environment.become(everything | environment.tasks_of_schedulers(everything))
    if spec.working_directory:  # empty on another machine than the kernel's, which has other folders
        sys.path[:] = spec.sys_path
        os.chdir(spec.working_directory)
    loggers.take_over(spec.loggers)
    torch_settings.take_over(spec.torch_settings)
    if _THREADS[0] not in os.environ:
        _share_processors(place.local_world_size)


def _share_processors(ranks: int) -> None:
    """Give each of this machine's ranks its share of the threads that libraries compute with.

    torch and numpy read their variables when the template imports them, so their threads are set by calls. The
    variables are for libraries that the rank imports itself, such as scipy, and for programs that it starts. A rank
    that has the whole machine keeps the settings of a process without a launch.
    """
    each = max(1, host_memory.cores() // ranks)
    importlib.import_module("torch").set_num_threads(each)
    if each >= (os.cpu_count() or 1):
        return
    if _THREADS[1] not in os.environ:
        for count in openblas_counts():
            count.value = min(count.value, each)
    for name in _THREADS:
        os.environ.setdefault(name, str(each))


def prepare_for_forks() -> None:
    """Do in the template what every rank would do, and what needs nothing of the rank's."""
    openblas_counts()
    host_memory.cores()  # finds the control groups, which stay
    torch_hooks.install()
    random_numbers.install()


@functools.cache
def openblas_counts() -> Sequence[ctypes.c_int]:
    """Return the thread counts of numpy's OpenBLAS, as variables to write to. First called in the template.

    A fork's OpenBLAS starts its threads when it needs them. Its function for setting their number starts all at once.
    """
    with open("/proc/self/maps") as maps:
        paths = {line.split(maxsplit=5)[-1].rstrip() for line in maps if "openblas" in line}
    counts = []
    for path in paths:
        with contextlib.suppress(OSError, ValueError):  # a build without these variables
            library = ctypes.CDLL(path)
            counts += [ctypes.c_int.in_dll(library, name) for name in ("blas_num_threads", "blas_cpu_number")]
    return counts


def _become_main(payload: int, rank: int) -> dict[str, Any]:
    """Make a new ``__main__`` as a notebook's code expects it, and return its names.

    Its spec names the module that fills ``__main__`` in workers that multiprocessing starts by spawn or forkserver.
    """
    module = types.ModuleType("__main__")
    module.__spec__ = importlib.machinery.ModuleSpec("notebook_accel.launching.ranks.worker_main", None)
    sys.modules["__main__"] = sys.modules["__mp_main__"] = module  # the second is the name in workers
    os.environ[NAMESPACE_VARIABLE] = f"/proc/{os.getpid()}/fd/{payload}"
    _install_hooks(module.__dict__, rank)
    return module.__dict__


def _stay_main(rank: int) -> dict[str, Any]:
    """Return the names of the kernel's ``__main__``, in a fork of the kernel."""
    namespace = sys.modules["__main__"].__dict__
    leaving.kernels_names.update(namespace)
    _install_hooks(namespace, rank)
    namespace["get_ipython"] = builtins.get_ipython  # type: ignore[attr-defined]  # instead of the kernel's
    # Workers started in another way would look for the notebook's names in a payload, and a fork has none.
    multiprocessing = importlib.import_module("multiprocessing")
    if multiprocessing.get_start_method(allow_none=True) is None:
        multiprocessing.set_start_method("fork")
    return namespace


def _install_hooks(namespace: dict[str, Any], rank: int) -> None:
    """Install what replaces the kernel for the user's code, and what counts and measures that code's steps."""
    ipython_shims.install(namespace)
    displays.install(rank)
    progress.install()
    torch_hooks.begin()
    when_imported("multiprocessing.resource_tracker", track_what_is_made_here)


def track_what_is_made_here(tracker: Any) -> None:
    """Leave shared memory that this process only attaches to its maker, as ``track=False`` does since Python 3.13.

    Otherwise the end of this process would remove the kernel's shared memory.
    """
    register, unregister = tracker.register, tracker.unregister
    is_ours: dict[str, bool] = {}

    def register_ours(name: str, kind: str) -> None:
        if kind == "shared_memory" and not sys._getframe(1).f_locals.get("create", True):  # by SharedMemory.__init__
            is_ours.setdefault(name, False)
        else:
            is_ours[name] = True
            register(name, kind)

    def unregister_ours(name: str, kind: str) -> None:
        if is_ours.get(name, True):
            unregister(name, kind)

    tracker.register, tracker.unregister = register_ours, unregister_ours


def call(spec: JobSpec, target: Target, namespace: dict[str, Any]) -> Any:
    """Run the user's code and return its value; ``None`` if it ends with ``sys.exit()``."""
    try:
        if spec.cell is None:
            return target.function(*target.args, **target.kwargs)
        value = run_cell(spec.cell, spec.cell_filename, namespace)
        return namespace[spec.calls](*target.args, **target.kwargs) if spec.calls else value
    except SystemExit as end:
        if end.code not in (None, 0):
            raise
        return None


def finish_background_work() -> None:
    """Wait for what the user's code has left running, such as the writing of a checkpoint, and raise its error."""
    functions = list(reporting.reporter().before_result)
    with leaving.late_told("waits", lambda: "what it has left running") if functions else contextlib.nullcontext():
        for function in functions:
            function()


def run_cell(source: str, filename: str, namespace: dict[str, Any]) -> Any:
    """Run the cell at module level. Return the value of its last statement if that is an expression, else ``None``."""
    tree = ast.parse(source, filename)
    last = tree.body[-1] if tree.body else None
    if not isinstance(last, ast.Expr):
        exec(compile(tree, filename, "exec", dont_inherit=True), namespace)
        return None
    tree.body.pop()
    exec(compile(tree, filename, "exec", dont_inherit=True), namespace)
    return eval(compile(ast.Expression(last.value), filename, "eval", dont_inherit=True), namespace)


def _wait_for_release(link: Connection) -> None:
    """Wait until all ranks have finished: rank 0 serves the store, and a rank that leaves breaks the others' groups.

    No deadline is needed: the agent ends every run, and the template's end kills this rank.
    """
    with contextlib.suppress(ClosedError):
        while True:
            link.receive()
