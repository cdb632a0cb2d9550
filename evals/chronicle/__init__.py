"""Generate the evaluations' own text: a survey's chronicle that no model of this project was trained on.

No module that `training` imports may import this package (import-linter checks it). The chronicle shares no words but
function words, and no sentences, with the training text (`tests/evals/test_chronicle.py`).
"""
