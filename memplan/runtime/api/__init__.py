"""The functions that users call (`compile`, `compile_step`, `profile`) and the objects that they return.

In: a model, example inputs and options. Out: a `CompiledModule` or `CompiledStep`. Start at `compile.py` and
`compile_step.py`, then `compiled_module.py` and `compiled_step.py`. `module_builder.py` and `step_builder.py` trace
what the builder of all programs (`runtime/builder.py`) plans. `module_programs.py` and `symbolic_programs.py` find the
program of a call among those that are kept (`runtime/programs.py`); `module_calls.py` does what happens to calls that
have none. `calls_of_several.py` runs those of several graphs, and of several ranks; `on_demand_offload.py` runs calls
without a plan.
"""
