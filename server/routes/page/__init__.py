"""Serve the page at `/`: a chat, and what the server is doing."""
