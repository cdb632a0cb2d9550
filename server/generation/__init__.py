"""Turn a request body into work for the engine, and the engine's output into pieces of an answer."""
