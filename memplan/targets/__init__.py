"""Plans the step of a GPU on a machine that has none.

In: a `GpuTarget` (of `core/gpus.py`) and a question that traces and plans. Out: its answer. Start at `child.py`, which
asks it in a process of its own, in which `stand_in.py` has torch, Inductor and Triton believe that the device is there.
Nothing runs on it, and nothing of it is loaded where tensors hold numbers. `attention.py` says which kernel of
attention a device takes, and `guard.cpp` is what autograd's engine asks of a device.
"""
