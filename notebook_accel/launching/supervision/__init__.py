"""What runs in the agent: ranks are started from templates, heard, and ended, however that is."""
