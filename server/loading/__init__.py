"""Which of a deployment's models are loaded: requests wait for theirs, and engines come and go as they want."""
