"""The engine process: loading, the loop over steps, and the sockets."""
