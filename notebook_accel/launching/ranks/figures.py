"""The matplotlib backend of a rank: a figure that is shown, or left open at the end, appears in the notebook.

matplotlib imports this when it draws, because ``MPLBACKEND`` names it in ranks whose kernel draws into the notebook.
"""

from __future__ import annotations

from matplotlib._pylab_helpers import Gcf
from matplotlib.backend_bases import FigureManagerBase
from matplotlib.backends.backend_agg import FigureCanvasAgg

from notebook_accel.launching.ranks import displays

__all__ = ["FigureCanvas", "FigureManager"]


class FigureManager(FigureManagerBase):
    """What ``pyplot`` asks to show figures."""

    def show(self) -> None:
        """``figure.show()``: shows this one, which stays open."""
        displays.display(self.canvas.figure)

    @classmethod
    def pyplot_show(cls, *, block: bool | None = None) -> None:  # noqa: ARG003 - nobody can close a window here
        """``plt.show()``: shows every open figure, and closes it."""
        for manager in Gcf.get_all_fig_managers():
            displays.display(manager.canvas.figure)
        Gcf.destroy_all()


class FigureCanvas(FigureCanvasAgg):
    """The name that matplotlib looks for in a backend."""

    manager_class = FigureManager


def _show_what_is_left_open() -> None:
    for manager in Gcf.get_all_fig_managers():
        if manager.canvas.figure not in displays.shown_figures:
            displays.display(manager.canvas.figure)
    Gcf.destroy_all()


displays.at_end(_show_what_is_left_open)
