"""Compress what is saved for the backward (`compress=`): masks as bits, activations as 8-bit codes.

In: an fx graph. Out: the graph with ops that compress and decompress. Start at `saved_for_backward.py`, which finds
these storages, `pack.py` is exact, and `quantize.py` has a stated error.
"""
