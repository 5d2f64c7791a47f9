"""Several devices: which blocks of a step run where, and the transfers between them as ops of the graph.

`blocks.py` (graph -> units of ops that stay together), `assign.py` (units -> devices), `divide.py` (graph -> graph with
transfers), `simulate.py` (what that takes).
"""
