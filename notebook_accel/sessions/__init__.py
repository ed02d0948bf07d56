"""Sessions: ranks that keep running between cells."""
