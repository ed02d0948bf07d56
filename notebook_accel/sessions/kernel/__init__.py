"""The kernel's side of a session: it starts ranks, sends them requests and shows their answers."""
