"""Partitions a step over several devices: the device of each block, and the transfers between devices as ops.

`blocks.py` (graph -> units of ops that stay together), `assign.py` (units -> devices), `divide.py` (graph -> graph with
transfers), `simulate.py` (predicted seconds).
"""
