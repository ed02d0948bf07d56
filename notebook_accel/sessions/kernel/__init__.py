"""The kernel's side of a session: which ranks there are, what they are asked, and what the notebook is shown."""
