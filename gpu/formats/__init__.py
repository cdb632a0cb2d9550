"""The weight formats, a folder each, which no list names.

A folder's `__init__.py` has FORMAT (`gpu.model.weight_format.WeightFormat`): it reads `quantization_config` without
torch. Its `tensors.py` has `stored_tensors`, which names a module's tensors and puts them into a packed matrix.
"""
