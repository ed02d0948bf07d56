"""Backends, one file each, behind one interface: ``backend.Backend``."""
