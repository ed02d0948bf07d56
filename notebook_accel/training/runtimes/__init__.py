"""Backends, one file each, behind one seam: ``runtime.Runtime``."""
