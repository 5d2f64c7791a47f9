"""The backend of `torch.compile(model, backend="memplan")`.

In: the graphs that dynamo traces. Out: callables that run them at planned addresses. Start at `backend.py`; a
callable is in `planned_graph.py`, with the module that it makes of a graph; `joint_plan.py` has the plan of all graphs.
"""
