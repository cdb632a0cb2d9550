"""Run the engine process: loading, the loop over steps, and the sockets."""
