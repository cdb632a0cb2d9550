"""Queue prefill jobs, cut them into units, and learn what units and steps cost."""
