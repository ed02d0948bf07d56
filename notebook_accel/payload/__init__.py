"""Objects on their way: pickled by value, tensors in memory that ranks map, errors that name the object."""
