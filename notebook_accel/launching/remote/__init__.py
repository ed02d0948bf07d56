"""Runs over several agents on other machines, independent of the transport to them."""
