"""Hold a request's draws to grammars and token rules."""
