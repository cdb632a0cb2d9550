"""AttentionPredictor without its serving: which blocks of a context the next token will attend to, from the last ones.

`network.py` is the model and its files, `predict.py` runs it for many heads at once, `history.py` keeps what it reads.
It is no method: a method of `gpu.methods` says what is fetched, read and dropped.
"""
