"""What a run says at its end: a table in the terminal, a JSON document, one self-contained HTML page."""
