"""Serve the application over HTTP: the process, its connections, and what surrounds every request."""
