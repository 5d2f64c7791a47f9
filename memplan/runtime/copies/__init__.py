"""Copies between the arena and the host that run beside the step.

In: tensors in the arena and on the host. Out: a `Copy`, which is started and waited for. Start at `copies.py` (the
protocols); `copy_threads.py` copies in threads on the CPU, `copy_streams.py` in streams of an accelerator.
"""
