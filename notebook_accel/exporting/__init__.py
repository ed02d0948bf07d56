"""A cell becomes a script that runs without its notebook."""
