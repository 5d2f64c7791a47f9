"""Generates straight-line Python from a bound step, so that nothing is decided while it runs.

In: bound ops in the order of the schedule. Out: source code of a forward and a backward, and the globals of that
code. Start at `codegen.py`. `step_ir.py` is the intermediate form of the code, with its globals.
"""
