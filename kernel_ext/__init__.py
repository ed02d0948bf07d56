"""The IPython extension, ``%load_ext notebook_accel`` (or ``kernel_ext``): the magics and the panel.

Importing this package touches no device and doesn't import torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from IPython.core.interactiveshell import InteractiveShell

__all__ = ["load_ipython_extension", "unload_ipython_extension"]


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Register the magics, and warm the template so that the first launch finds it ready."""
    from kernel_ext import magics

    magics.register(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Remove the magics and stop all runs."""
    from kernel_ext import magics

    magics.unregister(shell)
