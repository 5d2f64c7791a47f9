"""A program with its parameters, its way through autograd, and its way out.

`trial.py` runs the step once, `program.py` makes it two generated functions, `runner.py` calls them, `autograd_step.py` is the
link to autograd; `owned_gradients.py`, `arena_gradients.py` and `cuda_graphs.py` are variants; `optimizer_state.py`.
"""
