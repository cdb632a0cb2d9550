"""Keep pools of pages, windows and rings on the device, and find the prefixes that requests share."""
