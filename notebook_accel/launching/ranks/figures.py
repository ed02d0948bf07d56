"""The matplotlib backend of a rank. Figures that are shown, or left open at the end, appear in the notebook.

A rank whose kernel draws into the notebook names this module in ``MPLBACKEND``, and matplotlib imports it.
"""

from __future__ import annotations

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from notebook_accel.launching.ranks import displays


class FigureManager(FigureManagerBase):
    """Shows figures for ``pyplot``."""

    def show(self) -> None:
        """Show this figure for ``figure.show()``, and leave it open."""
        displays.display(self.canvas.figure)

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:  # noqa: ARG003 - nobody can close a window here
        """Show and close every open figure, for ``plt.show()``."""
        for manager in Gcf.get_all_fig_managers():
            displays.display(manager.canvas.figure)
        Gcf.destroy_all()


class FigureCanvas(FigureCanvasAgg):
    """The canvas, under the name that matplotlib looks for in a backend."""

    manager_class = FigureManager


def _show_open_figures() -> None:
    for manager in Gcf.get_all_fig_managers():
        if manager.canvas.figure not in displays.shown_figures:
            displays.display(manager.canvas.figure)
    Gcf.destroy_all()


displays.at_end(_show_open_figures)
