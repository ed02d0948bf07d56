"""What runs in the elastic process of a run that may restart or has several nodes: torch elastic, and ours."""
