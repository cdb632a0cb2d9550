"""What of the `host` section decides the KV of a context that goes down: all that moves a decoded token's."""

DEPOSIT_KEYS = {
    "rows": "rows",
    "sink": "sink_tokens",
    "window": "window_tokens",
    "dense": "dense_layers",
    "resident": "resident_tokens",
    "residency": "residency",
}
