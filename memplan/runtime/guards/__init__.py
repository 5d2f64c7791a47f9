"""Whether a call is the one that was planned: inputs, Python values, module state, as dynamo's guards check it.

`input_guards.py` (arguments), `layout_guards.py` (tensors), `python_value_guards.py`, `module_state_guards.py` (parameters,
buffers, submodules), `hook_counts.py`, `transforms.py` (`torch.func`). Each raises or reports the first difference.
"""
