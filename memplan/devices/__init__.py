"""One vocabulary for devices: kinds, streams and events, pinned memory, generators. Nothing else names a vendor.

In: a `torch.device`. Out: torch's generic objects (`torch.Stream`, `torch.Event`, `torch.accelerator`). Start at
`kinds.py`. What torch has for CUDA only (graphs that replay at fixed addresses, memory pools, allocators of one's own)
is in the three modules that pyproject.toml lists for it. Everything else is written for ROCm, XPU and PrivateUse1
devices too, of which only a simulated one (`tests/device/`) has been run.
"""
