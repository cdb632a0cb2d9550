"""Convert between text and token ids."""
