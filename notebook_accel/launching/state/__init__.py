"""What a run is doing, reduced from its events: one model, which panel, plain lines, errors and `job.ranks` read."""
