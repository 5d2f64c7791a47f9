"""The functions that users call (`compile`, `compile_step`, `profile`) and the objects that they return.

In: a model, example inputs and options. Out: a `CompiledModule` or `CompiledStep`. Start at `compile.py` and
`compile_step.py`, then `compiled_module.py` and `compiled_step.py`. `builder.py` and `step_builder.py` trace, plan
and assemble programs; `select.py` and `shapes.py` choose the program of a call, `pending_calls.py` the instance of a
program where several calls are in flight, and `module_calls.py` what happens to calls for which there is none;
`loss_module.py` is a model with its loss. `eager_step.py` and `on_demand_offload.py` run calls without a plan.
"""
