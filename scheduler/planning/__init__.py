"""Plan an engine's memory and price its steps before it is loaded."""
