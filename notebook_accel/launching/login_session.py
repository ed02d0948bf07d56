"""systemd's login sessions and services, with whose end systemd kills all their processes.

Processes of a login session are killed at its end if ``KillUserProcesses`` is set, even if the user lingers, and those
of a service, such as a Jupyter server's, when it is stopped. Processes of the user's own systemd manager live on, but
only if the user lingers: without that, the manager ends with the user's last session. So the processes of a detached
run move to the manager, as ``systemd-run --user --scope`` does.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import pathlib
import re
import shutil
import subprocess
import time
from collections.abc import Collection, Mapping

from notebook_accel.errors import Finding

_PROC = pathlib.Path("/proc")
_LINGERING = pathlib.Path("/var/lib/systemd/linger")
_ASK_LOGIND = (
    *("busctl", "get-property", "org.freedesktop.login1", "/org/freedesktop/login1"),
    *("org.freedesktop.login1.Manager", "KillUserProcesses"),
)
_START_SCOPE = (
    *("busctl", "--user", "call", "org.freedesktop.systemd1", "/org/freedesktop/systemd1"),
    *("org.freedesktop.systemd1.Manager", "StartTransientUnit", "ssa(sv)a(sa(sv))"),
)
_SERVICE = re.compile(r"/system\.slice/(?:[^/\n]+\.slice/)*([^/\n]+\.service)$", re.MULTILINE)
_ANSWER_DEADLINE_S = 2.0
_PAUSE_S = 0.02
_MOST_MOVES = 5  # processes that have not been moved yet may start others meanwhile


def user_name() -> str:
    """Return the name of this process's user; empty if it has none, and on Windows."""
    with contextlib.suppress(ImportError, AttributeError, KeyError):
        return str(importlib.import_module("pwd").getpwuid(os.getuid()).pw_name)
    return ""


def check_logout() -> tuple[Finding, ...]:
    """Return a warning if systemd ends a detached run of this process with the user's login, or with a service."""
    group = _group("self")
    lingers = _lingers()
    if lingers and (_reaches_manager() or not _may_end(group)):
        return ()
    if service := _SERVICE.search(group):
        when = f"when the service {service[1]} is stopped"
    elif "/user.slice/" in group and (not _is_of_login(group) or _kills_user_processes()):
        when = "when you log out of this machine"
    else:
        return ()
    fix = f"loginctl enable-linger {user_name()}, once, before you launch"
    if lingers:
        fix = "systemd-run --user --scope COMMAND, to start this process by the user's own systemd"
    why = "This process belongs to your login there, or to that service, and so does all that it starts."
    return (Finding(f"systemd ends a detached run {when}.", why, fix, refuses=False),)


def leave(sessions: Collection[int], run_id: str) -> None:
    """Move processes out of this process's login session or service, if they end with it. Does nothing if it can't.

    Those of a service stay there unless the user lingers, since a service may outlive the user's manager.

    Args:
        sessions: The operating system's sessions of the processes, by their leaders' pids.
        run_id: The run's id, for the name of the scope.
    """
    group = _group("self")
    if not (_kills_user_processes() if _is_of_login(group) else _SERVICE.search(group) and _lingers()):
        return
    name = re.sub(r"[^A-Za-z0-9.-]", "_", run_id)
    for number in range(_MOST_MOVES):
        if not (pids := _left(sessions)) or not _move(pids, f"notebook-accel-{name}-{number}.scope"):
            return


def _left(sessions: Collection[int]) -> list[str]:
    """Return the processes of these sessions that belong to a login or a service."""
    found = []
    for pid in filter(str.isdigit, os.listdir(_PROC)):
        with contextlib.suppress(OSError):  # it has just ended
            if os.getsid(int(pid)) in sessions and _may_end(_group(pid)):
                found.append(pid)
    return found


def _move(pids: list[str], scope: str) -> bool:
    """Move processes to a new scope of the user's manager, and return whether that worked."""
    properties = ("PIDs", "au", str(len(pids)), *pids, "CollectMode", "s", "inactive-or-failed")
    environ = {**os.environ, "DBUS_SESSION_BUS_ADDRESS": f"unix:path={_manager_socket()}"}
    if _answer((*_START_SCOPE, scope, "fail", "2", *properties, "0"), environ) is None:
        return False
    deadline_s = time.monotonic() + _ANSWER_DEADLINE_S
    while any(_may_end(_group(pid)) for pid in pids):
        if time.monotonic() > deadline_s:
            return False
        time.sleep(_PAUSE_S)
    return True


def _group(pid: str) -> str:
    """Return the control groups of a process; empty if there are none or it has ended."""
    with contextlib.suppress(OSError):
        return (_PROC / pid / "cgroup").read_text()
    return ""


def _is_of_login(group: str) -> bool:
    return "/user.slice/" in group and "/session-" in group


def _may_end(group: str) -> bool:
    return _is_of_login(group) or _SERVICE.search(group) is not None


def _manager_socket() -> pathlib.Path:
    """Return the socket of the user's manager. ``DBUS_SESSION_BUS_ADDRESS`` may name a bus without the manager."""
    return pathlib.Path(os.environ.get("XDG_RUNTIME_DIR") or f"/run/user/{os.getuid()}", "bus")


def _reaches_manager() -> bool:
    """Return whether processes can move: busctl is there, and the user's manager has a socket."""
    return shutil.which(_START_SCOPE[0]) is not None and _manager_socket().exists()


def _lingers() -> bool:
    """Return whether the user's manager lives without a session of the user."""
    return bool(name := user_name()) and (_LINGERING / name).exists()


def _kills_user_processes() -> bool:
    """Return systemd's setting ``KillUserProcesses``."""
    return _answer(_ASK_LOGIND, os.environ) == ["b", "true"]


def _answer(command: tuple[str, ...], environ: Mapping[str, str]) -> list[str] | None:
    """Return the words that a command prints, ``None`` if it fails."""
    with contextlib.suppress(OSError, subprocess.SubprocessError):
        asked = subprocess.run(
            command, env=environ, stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=_ANSWER_DEADLINE_S, check=True,
        )  # fmt: skip
        return asked.stdout.split()
    return None
