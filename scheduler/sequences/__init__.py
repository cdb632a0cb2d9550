"""State of one request, and the limits that every request must meet."""
