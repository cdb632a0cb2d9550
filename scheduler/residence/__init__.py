"""Place keys and values on the device or in host memory, and move them between the two."""
