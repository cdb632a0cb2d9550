"""Load and unload a deployment's models as requests want them; a request waits until its model is loaded."""
