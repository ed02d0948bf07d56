"""Views of a run, and the lines of text that they show."""
