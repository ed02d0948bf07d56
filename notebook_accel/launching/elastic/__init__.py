"""The elastic process of a run that may restart or has several nodes: torch elastic, whose ranks our agent starts."""
