"""Find and fetch models by their names on a hub, and list those that were fetched."""
