"""What shows a run: the seam, and the plain lines that need no notebook."""
