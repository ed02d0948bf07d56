"""A rank's side of a session: the loop that waits for the next cell and runs it."""
