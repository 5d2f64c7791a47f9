"""Partitions a step over several devices: the device of each block, and the transfers between devices as ops.

In: a `Graph` and the number of devices. Out: the device of each op, and a `Graph` with the transfers. In the order of
the data flow: `blocks.py` (graph to units of ops that stay together), `assign.py` (units to devices), `divide.py`
(graph to graph with transfers), `simulate.py` (predicted seconds).
"""
