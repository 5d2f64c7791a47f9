"""Passes over the captured fx graph: graph in, the same graph out, changed in place.

Start at `rewrite.py` (how a pass changes a graph) and `nodes.py` (which bytes a node reads and writes). Then read
`own_outputs.py`, `simplify.py` and `lowering.py`. These change no bit of any result; `compression.py` may.
"""
