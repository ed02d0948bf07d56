"""What runs in the template and in the ranks: from a fork to the end of the user's code, and what that finds."""
