"""AttentionPredictor: predict from the last steps which blocks of a context the next token will attend to.

`network.py` has the model and its files, `predict.py` runs it for many heads at once, `history.py` keeps its input. It
is not a method by itself: a method in `gpu.methods` decides what is fetched, read and dropped.
"""
