"""This project against its peers, side by side."""
