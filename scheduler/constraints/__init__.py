"""Grammars and token rules that a request's draws must obey."""
