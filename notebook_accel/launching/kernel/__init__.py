"""The kernel's side of a launch: from a cell or a function to a run, its handle and its engine."""
