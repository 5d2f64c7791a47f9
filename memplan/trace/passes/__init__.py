"""Passes over the captured fx graph that change no bit of any result: graph in, graph out.

In: an fx graph. Out: the same graph, changed in place. Start at `rewrite.py` (how a pass changes a graph) and
`aliasing.py` (which bytes a node reads and writes). Then read `own_outputs.py`, `fold.py` and `simplify.py`.
`out_variants.py` and `randomness.py` answer questions about single ops.
"""
