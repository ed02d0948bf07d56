"""The names that users of Accelerate import from ``accelerate.launchers``."""

from notebook_accel import debug_launcher, notebook_launcher

__all__ = ["debug_launcher", "notebook_launcher"]
