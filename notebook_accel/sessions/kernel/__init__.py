"""The kernel's side of a session: it starts ranks, sends them requests and shows what they answer."""
