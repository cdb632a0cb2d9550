"""Collect the model families, a folder each, which no list names. `docs/MODELS.md` says how to add one.

A folder's `__init__.py` has FAMILY (`gpu.model.family.Family`): Hugging Face keys, names of tensors, and where there
are some a GGUF form and named shapes. `python -m gpu.model.library_key_search` writes `library_keys.json` into each
folder whose model types transformers has. In a folder without that file every key that the family does not read is
refused.
"""
