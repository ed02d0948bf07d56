"""Hooks that run as soon as a module is imported, without importing it."""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import importlib.util
import sys
import types
from collections.abc import Callable

Hook = Callable[[types.ModuleType], None]


def when_imported(name: str, hook: Hook) -> None:
    """Call ``hook`` with a module: at once if it is imported already, else as soon as it is.

    The hook runs before the importer sees the module, so that ``from name import x`` gets the hook's replacements.
    """
    module = sys.modules.get(name)
    if module is not None:
        hook(module)
    else:
        _FINDER.hooks.setdefault(name, []).append(hook)
        if _FINDER not in sys.meta_path:
            sys.meta_path.insert(0, _FINDER)


class _Finder(importlib.abc.MetaPathFinder):
    """Wraps the loaders of the modules that have hooks; other finders find the modules."""

    def __init__(self) -> None:
        self.hooks: dict[str, list[Hook]] = {}

    def find_spec(self, fullname: str, *_: object) -> importlib.machinery.ModuleSpec | None:
        hooks = self.hooks.pop(fullname, None)  # removed, so that the search below skips this finder
        if hooks is None:
            return None
        spec = importlib.util.find_spec(fullname)
        self.hooks[fullname] = hooks  # kept until the import, since some programs only ask whether a module is there
        if spec is not None and spec.loader is not None:
            spec.loader = _Loader(spec.loader, self.hooks)
        return spec


class _Loader(importlib.abc.Loader):
    """Runs the module's own loader and then the hooks."""

    def __init__(self, loader: importlib.abc.Loader, hooks: dict[str, list[Hook]]) -> None:
        self._loader = loader
        self._hooks = hooks

    def create_module(self, spec: importlib.machinery.ModuleSpec) -> types.ModuleType | None:
        return self._loader.create_module(spec)

    def exec_module(self, module: types.ModuleType) -> None:
        name = module.__name__
        module.__loader__ = self._loader  # the module's own loader has the source, for tracebacks
        if module.__spec__ is not None:
            module.__spec__.loader = self._loader
        self._loader.exec_module(module)
        for hook in self._hooks.pop(name, ()):
            hook(module)


_FINDER = _Finder()
