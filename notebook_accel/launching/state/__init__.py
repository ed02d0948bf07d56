"""The one model of a run, reduced from its events: panel, plain lines, errors and ``job.ranks`` read it."""
