"""Code that runs in a rank, from its fork to the end of the user's code."""
