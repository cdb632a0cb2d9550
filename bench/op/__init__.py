"""Time one operation of the engine at a time: `tandem bench op NAME`."""
