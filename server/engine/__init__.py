"""Start, supervise and talk to the engine process."""
