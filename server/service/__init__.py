"""Hold what all routes share, and the defaults that the model's files state."""
