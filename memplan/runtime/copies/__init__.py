"""Copies between the arena and the host that run beside the step: `copies.py` (the protocol), threads on CPU, streams on CUDA."""
