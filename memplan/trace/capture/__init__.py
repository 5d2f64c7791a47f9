"""Capture one forward and backward of a module as a single functional fx graph of ATen ops, on fake tensors.

In: an `nn.Module` and example inputs. Out: `Captured`. Start at `joint_graph.py` (AOTAutograd), then `front_ends.py`
(dynamo). Beside them: what is refused (`refusals.py`, `effects.py`), which Python values forward reads
(`python_values.py`), and where fake kernels differ from real ones (`as_eager.py`).
"""
