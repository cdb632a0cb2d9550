"""Settings chosen by measurement on the user's own model: what a method reads and errs over a grid."""
