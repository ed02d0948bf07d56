"""The model of a run, reduced from its events. Panel, plain lines, errors and ``job.ranks`` read it."""
