"""Export of a cell as a script that runs without its notebook."""
