"""Read the text of an answer: reasoning, content and tool calls."""
