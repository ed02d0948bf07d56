"""Runs over several agents on other machines, whatever reaches them."""
