"""The training runtime: what runs inside a rank. Never imports ``launching``, so the kernel never imports this."""
