"""Lowering rules: ops without a true `out=` kernel become memory and kernels that fill it, with the same bits.

In: an fx graph. Out: the same graph, lowered. Start at `rules.py`, the table of rules. `layer_rules.py` has the rules
of layers and losses, `products.py` those of products.
"""
