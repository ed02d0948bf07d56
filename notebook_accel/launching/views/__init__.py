"""The views of a run: the seam, and plain lines, which need no notebook."""
