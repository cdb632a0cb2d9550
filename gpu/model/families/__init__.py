"""The model families, a folder each, which no list names.

A folder's `__init__.py` has FAMILY (`gpu.model.family.Family`): Hugging Face keys, names of tensors, and where there
are some a GGUF form and named shapes, in files beside it. `python -m gpu.model.library_keys` writes its
`library_keys.json`; without that file every key that the family does not read is refused.
"""
