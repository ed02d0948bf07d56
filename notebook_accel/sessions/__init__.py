"""Ranks that stay between cells: a launched function that waits for what the notebook wants next."""
