"""The model of a run, reduced from its events, and the policy of what happens next.

Panel, plain lines, errors and ``job.ranks`` read the model. The agent drives the policy, and so does the kernel for the
machines of a cluster.
"""
