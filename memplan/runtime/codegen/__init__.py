"""The bound step as straight-line Python: nothing is decided while it runs.

Start at `codegen.py`; `step_ir.py` is what it writes from, `namespace.py` its globals, `torchscript_runs.py` makes one call of
several ops.
"""
