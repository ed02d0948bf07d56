"""The user's end of a debugger that runs in a rank: what it says is printed, what is typed goes to it."""

from __future__ import annotations

import sys

from notebook_accel.errors import RunError
from notebook_accel.sessions.kernel.interrupts import held

__all__ = ["Console"]


class Console:
    """Asks the user with ``input()``, which a kernel hands on to its front end.

    Attributes:
        refusal: Why nobody could be asked, if that is so.
    """

    def __init__(self) -> None:
        self._has_ended = False
        self.refusal: RunError | None = None

    def answer(self, text: str) -> str:
        """What the user types for this, with the end of the line; empty when there will be no more.

        Args:
            text: What the debugger says, its prompt at the end.
        """
        if self._has_ended:
            return ""
        before, newline, prompt = text.rpartition("\n")
        sys.stdout.write(before + newline)
        sys.stdout.flush()
        try:
            with held() as interrupts, interrupts.opened():
                return input(prompt) + "\n"
        except (EOFError, KeyboardInterrupt):
            sys.stdout.write("\n")
        except NotImplementedError:  # how a kernel says that its front end can't ask
            self.refusal = RunError(
                "A debugger asks for commands, and nobody can be asked here.",
                why="What runs this notebook, such as nbconvert or papermill, has nobody who could type something.",
                fix="open the notebook in a front end, or call session.debug() in a terminal",
            )
        self._has_ended = True
        return ""
