"""Messages between processes: frames, the events of a rank, and one file of messages for each pair of processes."""
