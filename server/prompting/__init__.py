"""Render chats and documents as the text of a prompt."""
