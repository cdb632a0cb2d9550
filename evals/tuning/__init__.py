"""Choose settings by measuring a method's reads and errors over a grid, on the user's own model."""
