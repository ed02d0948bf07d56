"""What processes say to each other: framed messages, the events of a rank, and one file of messages for each pair."""
