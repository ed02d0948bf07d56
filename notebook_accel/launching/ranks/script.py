"""A script or a module that ranks run as ``python script.py`` would, with its arguments.

Python's own ``runpy`` would leave frames of its own in every traceback.
"""

from __future__ import annotations

import contextlib
import dataclasses
import importlib.util
import os
import sys
import tokenize
import types
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder

from notebook_accel.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Script:
    """A script or a module, with its arguments.

    Attributes:
        target: A file, or the name of a module.
        arguments: The arguments in ``sys.argv`` after the script's own name.
        is_module: Whether the target is a module's name, as after ``python -m``.
    """

    target: str
    arguments: Sequence[str] = ()
    is_module: bool = False

    @property
    def name(self) -> str:
        """The script's name in messages."""
        return self.target if self.is_module else os.path.basename(self.target)

    def check(self) -> None:
        """Check that the script exists, before any process is started.

        Raises:
            ConfigError: There is no such file or module.
        """
        if self.is_module:
            with contextlib.suppress(FileNotFoundError):  # a launch is refused where the folder is gone
                sys.path.insert(0, os.getcwd())  # as ``python -m`` does; ranks get this process's path
            is_there = _is_module(self.target)
            fix = "run it where `python -m` finds it, or give the path of a file, without -m"
        else:
            is_there = os.path.isfile(self.target) or _main_inside(self.target) is not None
            fix = "notebook-accel launch [options] path/to/script.py [its arguments]; -m for a module"
        if not is_there:
            raise ConfigError(
                f"There is no {'module' if self.is_module else 'file'} {self.target!r} to launch.", fix=fix
            )

    def run(self) -> None:
        """Run the script in this process, as its ``__main__``."""
        main = types.ModuleType("__main__")
        path = os.path.abspath(self.target)
        code, main.__file__ = self._open_module(main) if self.is_module else _open_file(main, path)
        sys.argv[:] = [main.__file__ if self.is_module else path, *self.arguments]
        # DataLoader workers look for the script's classes in __main__; spawned workers look in its file.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(code, main.__dict__)

    def _open_module(self, main: types.ModuleType) -> tuple[types.CodeType, str]:
        spec = importlib.util.find_spec(self.target)
        if spec is not None and spec.submodule_search_locations is not None:  # a package: run its __main__
            spec = importlib.util.find_spec(f"{self.target}.__main__")
        if spec is None or spec.loader is None:
            raise ImportError(f"there is no module {self.target}.__main__ that could be run", name=self.target)
        return _open_spec(main, spec)


def _is_module(name: str) -> bool:
    """Return whether there is such a module, without running the code of the packages around it."""
    found, path = "", None
    for part in name.split("."):
        if not part or (found and path is None):  # what came before is no package
            return False
        found = f"{found}.{part}".lstrip(".")
        try:
            specs = [spec for finder in sys.meta_path if (spec := finder.find_spec(found, path)) is not None]
        except KeyError:  # a package without __init__.py whose parent isn't imported: only a rank can look into it
            return True
        if not specs:
            return False
        path = specs[0].submodule_search_locations
    return True


def _open_file(main: types.ModuleType, path: str) -> tuple[types.CodeType, str]:
    spec = _main_inside(path)
    if spec is not None:
        sys.path.insert(0, path)
        return _open_spec(main, spec)
    with tokenize.open(path) as file:
        source = file.read()
    sys.path.insert(0, os.path.dirname(path))
    return compile(source, path, "exec", dont_inherit=True), path


def _main_inside(path: str) -> ModuleSpec | None:
    """Return the ``__main__`` of a folder or a zip file, such as a ``.pyz``; ``None`` if it has none."""
    return PathFinder.find_spec("__main__", [path])


def _open_spec(main: types.ModuleType, spec: ModuleSpec) -> tuple[types.CodeType, str]:
    code = spec.loader.get_code(spec.name)  # type: ignore[union-attr]  # loaders of source have it
    if code is None:
        raise ImportError(f"{spec.origin} has no code that could be run", name=spec.name)
    main.__spec__, main.__package__ = spec, spec.parent
    return code, spec.origin or code.co_filename
