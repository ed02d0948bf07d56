"""The elastic process of a run on several nodes: torch elastic, whose ranks our agent starts."""
