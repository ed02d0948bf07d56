"""A slow program that runs beside the tests, which mostly wait, until one of them asks what came of it."""

from __future__ import annotations

import subprocess
import tempfile

__all__ = ["Program"]

_NICE = "10"  # the tests come first


class Program:
    """A program that has been started.

    Args:
        command: What to run.
        cwd: Where.
    """

    def __init__(self, command: list[str], cwd: str) -> None:
        self._said = tempfile.TemporaryFile()  # noqa: SIM115 - it is read when the program has ended
        self._process = subprocess.Popen(
            ["nice", "-n", _NICE, *command], cwd=cwd, stdin=subprocess.DEVNULL, stdout=self._said, stderr=self._said
        )

    def wait(self) -> tuple[int, str]:
        """Its exit status, and what it has written. The test's own time limit is the deadline."""
        status = self._process.wait()
        self._said.seek(0)
        return status, self._said.read().decode()

    def close(self) -> None:
        """Ends it, if nobody has waited for it."""
        self._process.kill()
        self._process.wait()
        self._said.close()
