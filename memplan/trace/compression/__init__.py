"""Compress what is saved for the backward (`compress=`): masks as bits, activations as 8-bit codes.

`saved_for_backward.py` finds these storages, `pack.py` is exact, and `quantize.py` has a stated error.
"""
