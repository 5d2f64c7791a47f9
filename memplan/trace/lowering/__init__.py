"""Lowering rules: ops without a true `out=` kernel become memory and kernels that fill it, with the same bits.

Start at `rules.py`, the table of rules; `layer_rules.py` has those of layers and losses, `products.py` of products.
"""
