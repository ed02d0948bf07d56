"""Ranks on the nodes of a Ray cluster. Ray itself is imported when a launch asks for it, and not before."""
