"""Objects in transit: pickled by value, with tensors in shared memory and errors that name the object."""
