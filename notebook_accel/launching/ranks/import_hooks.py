"""What is to be done as soon as a module is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable

__all__ = ["when_imported"]

Act = Callable[[types.ModuleType], None]


def when_imported(name: str, act: Act) -> None:
    """Calls ``act`` with a module: at once if it is imported already, else as soon as it has been.

    That is before whoever imports it sees it, so that ``from name import x`` gets what ``act`` has put there.
    """
    module = sys.modules.get(name)
    if module is not None:
        act(module)
    else:
        _finder().acts[name] = act


class _Finder(importlib.abc.MetaPathFinder):
    """Finds nothing itself: lends the loaders of the modules that are waited for."""

    def __init__(self) -> None:
        self.acts: dict[str, Act] = {}

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        act = self.acts.pop(fullname, None)  # so that the search below passes this finder by
        if act is None:
            return None
        spec = importlib.util.find_spec(fullname)
        if spec is None or spec.loader is None:
            self.acts[fullname] = act
        else:
            spec.loader = _Loader(spec.loader, act)
        return spec


class _Loader(importlib.abc.Loader):
    """Does what the module's own loader does, and then the act."""

    def __init__(self, loader: importlib.abc.Loader, act: Act) -> None:
        self._loader = loader
        self._act = act

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        module.__loader__ = self._loader  # which has the source, for tracebacks
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        self._act(module)


def _finder() -> _Finder:
    for finder in sys.meta_path:
        if isinstance(finder, _Finder):
            return finder
    finder = _Finder()
    sys.meta_path.insert(0, finder)
    return finder
