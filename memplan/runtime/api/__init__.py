"""The functions that users call (`compile`, `compile_step`, `profile`) and the objects that they return.

Start at `module.py` (`CompiledModule`) and `whole_step.py` (`CompiledStep`). `builder.py` and `step_builder.py` trace,
plan and assemble programs; `select.py` and `shapes.py` choose the program of a call; `pickling.py` copies modules.
"""
