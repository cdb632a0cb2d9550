"""The device's side of contexts on disk: pages are copied out for records, and prompts' fronts come in from them."""
