"""The agent: a process that supervises the runs of one kernel and never imports torch."""
