"""The folders of detached runs: one for each run, from its launch until some days after its end.

A folder has the launch's facts, the payload, the ranks' results and logs, the journal, and the socket of the run's
agent. Only its owner can open it. The agent holds a lock on a file in the folder for as long as it lives: a free lock
means that the agent is gone, however it ended. A restart of the machine frees the lock too.
"""

from __future__ import annotations

import contextlib
import errno
import functools
import itertools
import operator
import os
import pathlib
import secrets
import shlex
import shutil
import socket
import stat
import sys
import time
from collections.abc import Iterator
from typing import Any

import msgspec

from notebook_accel.errors import LaunchError, NotebookAccelError, RunError
from notebook_accel.launching import logs

JOURNAL_VERSION = 2
"""Number of the format of the folder and of the messages in it. Another number means that it can't be read."""

_YOUNG_S = 5.0  # an older unpublished folder that nobody holds belongs to a launch that was killed
_DAY_S = 86_400.0
_FACTS, _DRAFT, _LOCK, _KERNEL, _SOCKET = "run.json", "launch.json", "lock", "kernel", "socket"

# Files for ``RunFolder.create``, ``open`` and ``replace``. The latest has the last message of each kind.
PAYLOAD, JOURNAL, LATEST, AGENT_LOG = "payload", "journal", "latest", "agent.log"


@contextlib.contextmanager
def short_path(path: pathlib.Path) -> Iterator[str]:
    """Yield an address for the socket at ``path`` that fits the system's 107 bytes, however long the path is."""
    folder = os.open(path.parent, os.O_PATH | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        yield f"/proc/self/fd/{folder}/{path.name}"
    finally:
        os.close(folder)


class RunFacts(msgspec.Struct, frozen=True, kw_only=True):
    """The facts of a launch, which don't change while the run goes on.

    Attributes:
        config: The options that differ from their defaults, by name.
        log_folder: Folder of the ranks' logs; empty if there is none.
        began: Time of the launch, in seconds since the epoch.
        began_s: Time of the launch in seconds of ``time.monotonic()``, whose zero is the start of the machine.
        keep_days: Days that the folder stays after the run's end.
        version: Version of this package at the launch, as ``journal_version`` is ``JOURNAL_VERSION`` then.
        boot_id: The machine's id since its last start.
        has_payload: Whether the folder has the launch's payload. A run that was detached while it went on has none.
        is_session: Whether the ranks are a session's, which serve one kernel after another.
    """

    name: str
    world_size: int
    devices: str
    config: dict[str, Any]
    log_folder: str
    began: float
    began_s: float
    keep_days: float
    version: str
    journal_version: int
    host: str
    boot_id: str
    has_payload: bool = True
    is_session: bool = False


class RunFolder:
    """One run's folder."""

    def __init__(self, path: pathlib.Path) -> None:
        self.path = path

    @property
    def id(self) -> str:
        """The run's id: the folder's name."""
        return self.path.name

    def is_called(self, which: str) -> bool:
        """Return whether this is the run's name or id. Empty text means any run."""
        return which in ("", self.facts.name, self.id)

    @property
    def log_folder(self) -> pathlib.Path:
        """The default folder for logs."""
        return self.path / "logs"

    @functools.cached_property
    def facts(self) -> RunFacts:
        """The facts of the launch.

        Raises:
            NotebookAccelError: The facts can't be read.
        """
        try:
            path = self.path / (_FACTS if self.is_published else _DRAFT)
            return msgspec.json.decode(path.read_bytes(), type=RunFacts)
        except (OSError, msgspec.MsgspecError) as error:
            raise NotebookAccelError(f"The detached run in {self.path} can't be read: {error}.") from None

    def write_facts(self, facts: RunFacts) -> None:
        """Write the facts of a launch."""
        self.replace(_DRAFT, msgspec.json.encode(facts))

    def publish(self) -> None:
        """Make the run visible to ``find``. Called once its agent has taken over the launch."""
        os.replace(self.path / _DRAFT, self.path / _FACTS)

    @property
    def is_published(self) -> bool:
        """True once the run is visible to ``find``."""
        return (self.path / _FACTS).exists()

    def hold(self) -> int:
        """Take the lock, and return its descriptor. A process that inherits the descriptor holds the lock too."""
        descriptor = os.open(self.path / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        logs.flock(descriptor, "LOCK_EX", waits=True)  # only ``is_held`` of other processes takes it, for an instant
        return descriptor

    def hold_for_kernel(self) -> int:
        """Take the lock for the one kernel that a session has at a time, and return its descriptor.

        Raises:
            RunError: Another process holds the lock.
        """
        descriptor = os.open(self.path / _KERNEL, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            logs.flock(descriptor, "LOCK_EX")
        except BlockingIOError:
            who = os.pread(descriptor, 1024, 0).decode(errors="replace") or "another process"
            os.close(descriptor)
            raise RunError(
                f"The session {self.facts.name!r} belongs to another notebook just now: {who}.",
                why="A session takes its cells from one notebook at a time.",
                fix="%distributed detach there, or end that kernel; then attach again",
            ) from None
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, this_process().encode(), 0)
        return descriptor

    @property
    def name(self) -> str:
        """The run's name, which is in the lock's file before the run is published; empty if it can't be read."""
        with contextlib.suppress(OSError, NotebookAccelError):
            return self.facts.name if self.is_published else (self.path / _LOCK).read_text("utf-8")
        return ""

    @property
    def is_held(self) -> bool:
        """True while the run's agent lives, or the launch that is about to start it."""
        try:
            descriptor = os.open(self.path / _LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
        except OSError:
            return False
        try:
            logs.flock(descriptor, "LOCK_SH")
        except BlockingIOError:
            return True
        except OSError:
            return False
        finally:
            os.close(descriptor)
        return False

    def create(self, name: str) -> int:
        """Create a file, and return its descriptor."""
        return os.open(self.path / name, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)

    def open(self, name: str) -> int:
        """Return a descriptor for reading a file."""
        return os.open(self.path / name, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)

    def create_result(self, rank: int) -> int:
        """Return the descriptor of a new file for a rank's result."""
        return self.create(f"result_{rank}")

    def fill_result(self, rank: int, source: int) -> None:
        """Copy a rank's result from the file ``source`` into the folder."""
        with open(self.path / f"result_{rank}", "r+b", buffering=0) as file:
            position, size = 0, os.fstat(source).st_size
            while position < size:
                position += os.sendfile(file.fileno(), source, position, size - position)

    def open_result(self, rank: int) -> int:
        """Return a descriptor for reading a rank's result."""
        return self.open(f"result_{rank}")

    def replace(self, name: str, data: bytes) -> None:
        """Replace a file atomically: write under another name, then rename."""
        unfinished = self.path / f".{name}"
        try:
            with os.fdopen(os.open(unfinished, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), "wb") as file:
                file.write(data)
            os.replace(unfinished, self.path / name)
        except OSError:
            unfinished.unlink(missing_ok=True)
            raise

    def listen(self) -> socket.socket:
        """Create the listening socket of the run's agent."""
        with self._new_socket() as (listening, address):
            listening.bind(address)
            listening.listen(128)
        return listening

    def connect(self) -> socket.socket:
        """Connect to the run's agent.

        Raises:
            OSError: Nobody listens.
        """
        with self._new_socket() as (connected, address):
            connected.connect(address)
        return connected

    @contextlib.contextmanager
    def _new_socket(self) -> Iterator[tuple[socket.socket, str]]:
        """Yield a socket, which an error closes, and its address."""
        with short_path(self.path / _SOCKET) as address:
            made = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
            try:
                yield made, address
            except OSError:
                made.close()
                raise

    def close_socket(self) -> None:
        """Remove the socket file, when the agent ends."""
        (self.path / _SOCKET).unlink(missing_ok=True)

    def remove(self) -> None:
        """Remove the folder with its contents."""
        shutil.rmtree(self.path, ignore_errors=True)

    @property
    def changed(self) -> float:
        """Time of the run's last message, in seconds since the epoch."""
        names = (LATEST, JOURNAL, _FACTS)
        times = [path.stat().st_mtime for name in names if (path := self.path / name).exists()]
        return max(times, default=self.path.stat().st_mtime)


def root() -> pathlib.Path:
    """Return the folder of this user's detached runs, which may not exist yet.

    Raises:
        LaunchError: The user's state folder has no absolute path.
    """
    state = os.path.expanduser(os.environ.get("XDG_STATE_HOME") or "~/.local/state")
    if not os.path.isabs(state):
        raise LaunchError(
            f"There is no place for detached runs: {state} isn't an absolute path.",
            fix="set XDG_STATE_HOME to a folder of yours on a local disk",
        )
    return pathlib.Path(state, "notebook_accel", "runs")


def new_id(name: str) -> str:
    """Return a new id for a run of this name."""
    return f"{logs.dated(name)}-{secrets.token_hex(3)}"


def make(name: str, run_id: str = "", *, is_fixed: bool = False) -> tuple[RunFolder, int]:
    """Make the folder of a run, by default with a new id. Return it with the descriptor that holds its lock.

    If a run of that name goes on, the folder's ``name`` is a free one, such as ``train-2``; with ``is_fixed``, that is
    an error.

    Raises:
        LaunchError: The folder can't be made, or the fixed name is taken.
    """
    path = root() / (run_id or new_id(name))
    try:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        _check_rights(path.parent)
        with _one_at_a_time(path.parent):
            free = _free_name(name, is_fixed=is_fixed)
            path.mkdir(mode=0o700)
            folder = RunFolder(path)
            lock = folder.hold()
            os.pwrite(lock, free.encode(), 0)
            return folder, lock
    except OSError as error:
        raise LaunchError(
            f"The folder {path} for the detached run can't be made: {error.strerror}.",
            fix="set XDG_STATE_HOME to a folder of yours on a local disk with room",
        ) from None


@contextlib.contextmanager
def _one_at_a_time(folder: pathlib.Path) -> Iterator[None]:
    """Lock the folder of all runs, so that of two launches with one name the second sees the first."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        with contextlib.suppress(OSError):  # NFS can't lock a folder
            logs.flock(descriptor, "LOCK_EX", waits=True)
        yield
    finally:
        os.close(descriptor)


def _free_name(name: str, *, is_fixed: bool) -> str:
    """Return the name, with a number if a run of this name goes on or is being launched. Raise if it ``is_fixed``."""
    taken = {folder.name for folder in map(RunFolder, root().iterdir()) if folder.is_held}
    if is_fixed and name in taken:
        raise LaunchError(
            f"Your detached run {name!r} is in progress already.",
            fix=f"another name (--name, or %distributed detach NAME); or %distributed attach {shlex.quote(name)}, or "
            f"notebook-accel stop {shlex.quote(name)}",
        )
    numbered = (f"{name}-{number}" for number in itertools.count(2))
    return next(free for free in itertools.chain([name], numbered) if free not in taken)


def every() -> list[RunFolder]:
    """Return the readable folders of this user's detached runs, the oldest first.

    Folders that another user owns or can open are left out.

    Raises:
        NotebookAccelError: Another user owns or can open the folder of all runs, or it can't be read.
    """
    if not os.path.lexists(root()):
        return []
    _check_rights(root())
    try:
        paths = list(root().iterdir())
    except OSError as error:
        raise _unreadable(root(), error) from None
    found = []
    for path in paths:
        with contextlib.suppress(NotebookAccelError):
            _check_rights(path)
            folder = RunFolder(path)
            if folder.is_published:
                found.append((folder.facts.began, folder.id, folder))
    return [folder for *_, folder in sorted(found, key=operator.itemgetter(0, 1))]


def find(which: str = "") -> RunFolder:
    """Return the run with this name or id, preferably one that goes on, otherwise the latest.

    Without a name, return the only run that goes on; if none does, the latest.

    Raises:
        NotebookAccelError: There is no such run, several go on, or the folder's permissions are wrong.
    """
    _check_rights(root())
    known = every()
    named = [folder for folder in known if folder.is_called(which)]
    going = [folder for folder in named if folder.is_held]
    if named and (which or len(going) <= 1):
        return (going or named)[-1]
    for path in [] if named else filter(pathlib.Path.is_dir, root().iterdir()):
        _check_rights(path)  # raises the reason why ``every`` left it out
    listed = ", ".join(dict.fromkeys(shlex.quote(folder.facts.name) for folder in known))
    what = f"There is no detached run {which!r}" if which else "There are several detached runs" if going else ""
    raise NotebookAccelError(
        f"{what or 'There is no detached run'} of yours on this machine.",
        fix=f"name one of: {listed}" if listed else "start one, with %%distributed --detach --name NAME",
    )


def find_session(which: str = "") -> RunFolder | None:
    """Return the session that ``find`` finds; ``None`` if it finds none, or a run that is no session or has ended."""
    with contextlib.suppress(NotebookAccelError):
        found = find(which)
        return found if found.facts.is_session and found.is_held else None
    return None


def remove_old(*, all_ended: bool = False) -> list[str]:
    """Remove the folders of runs whose ``keep_days`` are over, or of ``all_ended`` ones, and those of killed launches.

    Returns the ids of the removed runs.
    """
    removed = []
    with contextlib.suppress(NotebookAccelError, OSError):
        _check_rights(root())
        for path in list(root().iterdir()):
            with contextlib.suppress(NotebookAccelError, OSError):
                _check_rights(path)
                folder = RunFolder(path)
                # The launch may be under way, or the lock may be another machine's and invisible here.
                may_be_young = not folder.is_published or folder.facts.host != socket.gethostname()
                if not folder.is_held and (_is_old(folder) or (all_ended and not may_be_young)):
                    folder.remove()
                    removed.append(folder.id)
    return removed


def this_process() -> str:
    """Return a description of this process, with its notebook's name if known, for messages to other users of a run."""
    # VS Code sets this variable, and names its sessions otherwise than its notebooks; Jupyter names them alike.
    notebook = vars(sys.modules["__main__"]).get("__vsc_ipynb_file__") or os.environ.get("JPY_SESSION_NAME")
    name = pathlib.Path(str(notebook or sys.argv[0] or sys.executable)).name
    return f"process {os.getpid()} ({os.fsencode(name).decode(errors='replace')})"


def _is_old(folder: RunFolder) -> bool:
    if not folder.is_published:
        return time.time() - folder.path.stat().st_mtime > _YOUNG_S
    return time.time() - folder.changed > folder.facts.keep_days * _DAY_S


@functools.cache
def boot_id() -> str:
    """Return the machine's id since its last start; empty if it has none."""
    with contextlib.suppress(OSError):
        return pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()
    return ""


def _check_rights(folder: pathlib.Path) -> None:
    """Raise NotebookAccelError unless the user owns the folder and nobody else can open it."""
    try:
        found = folder.lstat()
    except OSError as error:
        if error.errno == errno.ENOENT:
            raise NotebookAccelError(
                "There is no detached run of yours on this machine.",
                why=f"There is no folder {folder}.",
                fix="start one, with %%distributed --detach --name NAME",
            ) from None
        raise _unreadable(folder, error) from None
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != os.getuid() or found.st_mode & 0o077:
        raise NotebookAccelError(
            f"The folder {folder} of detached runs isn't used, since others than you can open it.",
            why="A run's folder has variables, results and the socket by which it is stopped.",
            fix=f"chmod 700 {shlex.quote(str(folder))}, if it is yours and you trust what is in it",
        )


def _unreadable(folder: pathlib.Path, error: OSError) -> NotebookAccelError:
    return NotebookAccelError(f"The folder {folder} can't be opened: {error.strerror}.")
