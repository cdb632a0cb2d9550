"""The device's side of contexts on disk: pages are copied to records, and prefixes of prompts are loaded from them."""
