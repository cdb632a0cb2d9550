"""Plan engine steps and turn their results into messages."""
