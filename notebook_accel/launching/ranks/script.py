"""A script or a module that ranks run as ``python script.py`` would, with its arguments.

Python's own ``runpy`` would leave frames of its own in every traceback.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import os
import sys
import tokenize
import types
from collections.abc import Sequence

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
            sys.path.insert(0, os.getcwd())  # as ``python -m`` does; ranks get this process's path
            try:
                is_there = importlib.util.find_spec(self.target) is not None
            except ModuleNotFoundError:  # the package around the module is missing
                is_there = False
            fix = "run it where `python -m` finds it, or give the path of a file, without -m"
        else:
            is_there = os.path.isfile(self.target)
            fix = "notebook-accel launch [options] path/to/script.py [its arguments]; -m for a module"
        if not is_there:
            raise ConfigError(
                f"There is no {'module' if self.is_module else 'file'} {self.target!r} to launch.", fix=fix
            )

    def run(self) -> None:
        """Run the script in this process, as its ``__main__``."""
        main = types.ModuleType("__main__")
        if self.is_module:
            code, path = self._open_module(main)
        else:
            path = os.path.abspath(self.target)
            with tokenize.open(path) as file:
                source = file.read()
            code = compile(source, path, "exec", dont_inherit=True)
            sys.path.insert(0, os.path.dirname(path))
        main.__file__ = path
        sys.argv[:] = [path, *self.arguments]
        # DataLoader workers look for the script's classes in __main__; spawned workers look in its file.
        sys.modules["__main__"] = sys.modules["__mp_main__"] = main
        exec(code, main.__dict__)

    def _open_module(self, main: types.ModuleType) -> tuple[types.CodeType, str]:
        spec = importlib.util.find_spec(self.target)
        if spec is not None and spec.submodule_search_locations is not None:  # a package: run its __main__
            spec = importlib.util.find_spec(f"{self.target}.__main__")
        code = spec.loader.get_code(spec.name) if spec is not None and spec.loader is not None else None  # type: ignore[attr-defined]  # what finds source has it
        if spec is None or code is None:
            raise ImportError(f"there is no module {self.target}.__main__ that could be run", name=self.target)
        main.__spec__, main.__package__ = spec, spec.parent
        return code, spec.origin or self.target
