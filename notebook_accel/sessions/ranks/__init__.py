"""The ranks' side of a session: the loop that waits for the next request and carries it out."""
