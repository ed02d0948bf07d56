"""The user's own modules in a session's rank, whose files may change after the rank has imported them."""

from __future__ import annotations

import importlib
import os
import sys
import traceback
from typing import Any

from notebook_accel import code_places


class UserModules:
    """Notices that files of the user's modules have changed, and reloads them or says so."""

    def __init__(self) -> None:
        self._known: set[str] = set()  # all modules that were looked at
        self._loaded_ns: dict[str, int] = {}  # the last change of each user's module when it was loaded; 0: unknown
        self._told_ns: dict[str, int] = {}  # the change that was last printed
        self._old_objects: dict[Any, Any] = {}  # of the modules before they were reloaded

    def note(self, since_ns: int) -> None:
        """Record the files of modules that were imported since the last call.

        A file that has changed after ``since_ns``, in nanoseconds of ``time.time_ns()``, may have done so after the
        import, as during a long cell. So it counts as changed.
        """
        new = sys.modules.keys() - self._known
        self._known.update(new)
        for name in new:
            file = getattr(sys.modules.get(name), "__file__", None)
            if isinstance(file, str) and file.endswith(".py") and code_places.is_the_users(file):
                changed_ns = _changed_ns(file)
                self._loaded_ns[name] = changed_ns if changed_ns < since_ns else 0

    def follow(self, *, reloads: bool) -> None:
        """Reload the modules whose files have changed, as the notebook does with ``%autoreload``, or print which."""
        for name, loaded_ns in list(self._loaded_ns.items()):
            module = sys.modules.get(name)
            file = getattr(module, "__file__", None) or ""
            changed_ns = _changed_ns(file)
            if changed_ns in (0, loaded_ns):
                continue
            if reloads:
                self._loaded_ns[name] = changed_ns
                self._reload(module)
            elif self._told_ns.get(name) != changed_ns:
                self._told_ns[name] = changed_ns
                print(
                    f"[{file} has changed, but the ranks keep the module {name} as it was. With %autoreload 2 in the "
                    "notebook, they reload it]",
                    file=sys.stderr,
                )

    def _reload(self, module: Any) -> None:
        autoreload: Any = importlib.import_module("IPython.extensions.autoreload")
        try:
            autoreload.superreload(module, old_objects=self._old_objects)
        except Exception:  # noqa: BLE001 - of the user's module, which stays as it was
            print(f"[{module.__name__} could not be reloaded:]\n{traceback.format_exc(limit=-1)}", file=sys.stderr)


def _changed_ns(file: str) -> int:
    """Return the time of a file's last change, 0 if there is no such file."""
    try:
        return os.stat(file).st_mtime_ns
    except OSError:
        return 0
