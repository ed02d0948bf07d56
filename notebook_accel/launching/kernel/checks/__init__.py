"""What a launch finds out before it starts: devices, and what speaks against it here."""
