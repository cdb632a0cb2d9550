"""The evaluations' own text: a survey's chronicle that no model of this project was trained on.

Nothing that `training` imports may import this package (import-linter holds it); words and sentences have nothing in
common with what it trains on but function words (`tests/evals/test_chronicle.py`).
"""
