"""The page at `/`: a chat, and what the server is doing."""
