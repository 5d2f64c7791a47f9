"""Copies between the arena and the host that run beside the step.

In: tensors in the arena and on the host. Out: a `Copy`, which is started and waited for. Start at `copies.py` (the
protocols, and copies in streams of an accelerator); `copy_threads.py` copies in threads on the CPU.
"""
