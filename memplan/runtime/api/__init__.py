"""The functions that users call (`compile`, `compile_step`, `profile`) and the objects that they return.

In: a model, example inputs and options. Out: a `CompiledModule` or `CompiledStep`. Start at `compile.py` and
`compile_step.py`, then `compiled_module.py` and `compiled_step.py`. `builder.py` and `step_builder.py` trace what the
builder of all programs (`runtime/builder.py`) plans; `select.py` and `shapes.py` choose the program of a call, and
`module_calls.py` what happens to calls for which there is none; `calls_of_several.py` runs those of several graphs, and
of several ranks. `on_demand_offload.py` runs calls without a plan.
"""
