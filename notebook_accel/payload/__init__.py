"""How objects travel: pickled by value, their tensors in memory that ranks map, and errors that name what can't."""
