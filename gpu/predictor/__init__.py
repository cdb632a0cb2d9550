"""Predict from the last steps which blocks of a context the next token will attend to (AttentionPredictor).

`network.py` has the model and its files, `predict.py` runs it for many heads at once, `history.py` keeps its input.
The predictor is not a method by itself: a method in `gpu.methods` decides what is fetched, read and dropped.
"""
