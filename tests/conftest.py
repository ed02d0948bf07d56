"""Fixtures that all tests share, and the leak check: a test that leaves anything behind fails."""

from __future__ import annotations

import contextlib
import gc
import os
import pathlib
import signal
import sys
import threading
import time
import types
from collections.abc import Iterable, Iterator
from typing import Any

import hypothesis
import pytest
from jupyter_client.manager import KernelManager

from notebook_accel.launching.kernel import launcher, local, preflight
from tests import kernels, processes

pytest_plugins = ["tests.launches", "tests.loopback"]  # fixtures that launch, for the tests of several folders

# Examples of property tests have no time limit of their own: on a busy machine any of them may take long.
hypothesis.settings.register_profile("no deadline", deadline=None)
hypothesis.settings.load_profile("no deadline")

_GRACE_S = 30.0  # what goes away by itself takes its time on a busy machine
_POLL_S = 0.02
# pytest says which test runs; torch says where it keeps compiled code, when its optimizers are first used; debugpy sets
# an option of its own, when an old jupyter_client starts a kernel.
_SET_BY_LIBRARIES = {"PYTEST_CURRENT_TEST", "TORCHINDUCTOR_CACHE_DIR", "PYDEVD_USE_FRAME_EVAL"}


# The tests start a thousand interpreters. Each would compile the project again where none may keep the bytecode, as in
# many containers.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# Threads of a computation wait for each other in loops that compute, which takes a hundred times as long where other
# tests compute. OpenMP reads this when torch is loaded, here and in all that the tests start.
os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def pytest_configure() -> None:
    """A shell that starts this in the background has it ignore SIGINT, which the tests send to themselves."""
    if signal.getsignal(signal.SIGINT) is signal.SIG_IGN:
        signal.signal(signal.SIGINT, signal.default_int_handler)


@pytest.fixture(scope="session", autouse=True)
def _own_home(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Keep detached runs, settings and caches in folders of the tests: the developer may have some in the home."""
    with pytest.MonkeyPatch.context() as patch:
        for name in ("XDG_STATE_HOME", "XDG_CACHE_HOME", "XDG_CONFIG_HOME", "IPYTHONDIR"):
            patch.setenv(name, str(tmp_path_factory.mktemp(name)))
        for name in ("HF_HOME", "NOTEBOOK_ACCEL_CONFIG_FILE"):
            patch.delenv(name, raising=False)
        yield


@pytest.fixture(scope="session", autouse=True)
def _room_for_launches() -> Iterator[None]:
    """Keep launches from warning of little shared memory, of which Docker gives a container just too little."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(preflight, "_SHARED_BYTES", -1)
        yield


@pytest.fixture(scope="session", autouse=True)
def _made_once() -> Iterator[None]:
    """Make what lasts for the whole session before the first test is checked for leaks."""
    processes.adopt_orphans()
    KernelManager().is_alive()  # makes the event loop that jupyter_client waits in
    yield
    local.engine().close()


@pytest.fixture(scope="session", autouse=True)
def _ranks_filter_warnings_as_python_does() -> Iterator[None]:
    """Keep pytest's filters in this process: in ranks they would make errors of the warnings of libraries."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(launcher, "warning_filters", types.SimpleNamespace(settings=list))
        yield


@pytest.fixture(scope="module")
def kernel(tmp_path_factory: pytest.TempPathFactory) -> Iterator[kernels.Kernel]:
    """A kernel that the tests of a module share."""
    with kernels.running(tmp_path_factory.mktemp("kernel")) as running:
        assert running.value("1 + 1") == "2"  # what the client makes lazily belongs to the fixture, not to a test
        yield running


@pytest.fixture
def file(tmp_path: pathlib.Path) -> pathlib.Path:
    """The path of a configuration file. Neither the file nor its folder exists."""
    return tmp_path / "folder" / "config.yaml"


@pytest.fixture(scope="module")
def engine() -> local.LocalEngine:
    """The agent and the template of this process, for tests that launch without a kernel. All modules share them."""
    running = local.engine()
    running.warm()  # if an earlier module has ended them
    return running


@pytest.fixture(autouse=True)
def _nothing_is_left(request: pytest.FixtureRequest) -> Iterator[None]:
    """Fails a test after which a process, thread, descriptor, shared memory segment or variable is left.

    Not on a cluster, whose own processes come and go: tests look for ranks there themselves.

    What fixtures of a wider scope hold was there before the test and may stay; so may the agent and the template that
    a kernel of theirs, or this process, keeps ready for its next launch.
    """
    if request.node.get_closest_marker("ray") is not None:
        yield
        return
    variables = dict(os.environ)
    before = _belongings()
    yield
    changed = _changed_variables(variables)
    left = _left_since(before)
    for name in changed:
        _restore(name, variables)
    for thing in left:
        if isinstance(thing, processes.Process):
            processes.kill(thing)
    found = [*left.values(), *(f"environment variable {name}" for name in changed)]
    assert not found, "the test left behind:\n" + "\n".join(found)


def _left_since(before: dict[Any, str]) -> dict[Any, str]:
    """Return what is new since ``before`` and doesn't go away by itself within the grace period."""
    deadline = time.monotonic() + _GRACE_S
    collected = False
    while True:
        left = {thing: text for thing, text in _belongings().items() if thing not in before and not _is_foreign(thing)}
        if not left or time.monotonic() > deadline:
            return left
        if not collected:
            gc.collect()
            collected = True
        time.sleep(_POLL_S)


def _is_foreign(thing: Any) -> bool:
    """Return whether this shared memory segment is somebody else's: /dev/shm belongs to the whole machine."""
    if not (isinstance(thing, tuple) and thing[0] == "shared memory"):
        return False
    try:
        found = os.stat(f"/dev/shm/{thing[1]}")
    except FileNotFoundError:
        return True
    if found.st_uid != os.getuid():  # who uses it can't be seen then
        return True
    inode = str(found.st_ino)  # glibc maps a semaphore under another name than the one that it then gives it
    ours = {os.getpid(), *(process.pid for process in processes.descendants(os.getpid()))}
    for pid in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError):  # it has just ended
            rows = pathlib.Path("/proc", pid, "maps").read_text().splitlines() if int(pid) not in ours else []
            if any("/dev/shm/" in row and row.split()[4] == inode for row in rows):
                return True
    return False


def _belongings() -> dict[Any, str]:
    """Return what this process and its descendants hold and would go on holding, with a line about each."""
    everything = processes.everything_below(
        os.getpid()
    )  # one look at the machine's processes, before and after each test
    _reap(process.pid for process in everything if process.state == "Z" and process.parent == os.getpid())
    below = [process for process in everything if process.state not in "ZX"]
    standing = _standing(below)
    found: dict[Any, str] = {process: f"process {process}" for process in below if process.pid not in standing}
    found.update({thread: f"thread {thread.name}" for thread in threading.enumerate()})
    # Segments are files. A folder is of somebody who uses /dev/shm for temporary files.
    segments = [entry.name for entry in os.scandir("/dev/shm") if entry.is_file()]
    found.update({("shared memory", name): f"/dev/shm/{name}" for name in segments})
    for descriptor in os.listdir("/proc/self/fd"):
        with contextlib.suppress(OSError):  # the one that lists the folder
            target = os.readlink(f"/proc/self/fd/{descriptor}")
            if target.startswith(("socket:", "pipe:", "anon_inode:", "/memfd:")):
                found["descriptor", target, descriptor] = f"descriptor {descriptor}: {target}"
    return found


def _standing(below: list[processes.Process]) -> set[int]:
    """The agents whose kernel lives, and their templates. Ranks have a template's command line, but not its parent."""
    agents = {
        process.pid
        for process in below
        # An agent is told its kernel's pid; an orphan has another parent now.
        if processes.is_agent(process) and process.command.endswith(f" {process.parent}")
    }
    templates = {process.pid for process in below if processes.is_template(process) and process.parent in agents}
    return agents | templates


def _reap(orphans: Iterable[int]) -> None:
    """Collects the ended processes that became this one's by ``adopt_orphans``; ``subprocess`` copes with it."""
    for pid in orphans:
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)


def _changed_variables(before: dict[str, str]) -> list[str]:
    after = dict(os.environ)
    names = (before.keys() | after.keys()) - _SET_BY_LIBRARIES
    return sorted(name for name in names if before.get(name) != after.get(name))


def _restore(name: str, before: dict[str, str]) -> None:
    os.environ.pop(name, None)
    if name in before:
        os.environ[name] = before[name]
