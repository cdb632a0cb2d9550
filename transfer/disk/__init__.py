"""Keep contexts on disk: keys and values in blocks named by their content, and what windows and states need beside."""
