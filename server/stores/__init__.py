"""Keep what clients leave on the server: documents and responses."""
