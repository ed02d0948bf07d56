"""Runs on a Ray cluster. Ray is imported only by a launch with ``engine="ray"``."""
