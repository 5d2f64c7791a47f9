"""What only waits for the backward, in fewer bytes (`compress=`): masks as bits, activations as 8-bit codes.

`saved_for_backward.py` says what waits, `pack.py` is exact, `quantize.py` loses what it states.
"""
