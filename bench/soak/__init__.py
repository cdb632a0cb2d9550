"""Keep a server under mixed load while its engine is killed again and again, and check what it promises."""
