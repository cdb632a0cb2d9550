"""Keep a server under mixed load while its engine is killed again and again, and check that it keeps its promises."""
