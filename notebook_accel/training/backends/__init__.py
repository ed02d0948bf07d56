"""Backends, one file each, behind one seam: ``backend.Backend``."""
