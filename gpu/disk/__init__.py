"""Copy pages on the device to records on disk, and load prefixes of prompts from records."""
