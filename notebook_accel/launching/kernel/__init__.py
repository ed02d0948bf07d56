"""What runs in the kernel or the command line: from a cell or a function to a run, its handle and its engine."""
