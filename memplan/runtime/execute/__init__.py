"""Runs a program with the current parameters, through autograd, and returns the model's result.

In: a `TracedGraph`, its `Plan` and an `Arena`. Out: a `Runner`, which is called with the leaves of a call. Start at
`runner.py`. `trial.py` runs the step once, `program.py` turns it into two generated functions, and `autograd_step.py`
connects them to autograd, with `values_of_call.py` and `gradients.py`, and runs a forward again for a second backward.
`instances.py` has the same program several times, for calls in flight together. `cuda_graphs.py`
records and replays steps; `optimizer_state.py` finds the state of the optimizer.
"""
