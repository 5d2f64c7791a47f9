"""The backend of `torch.compile(model, backend="memplan")`.

In: the graphs that dynamo traces. Out: callables that run them at planned addresses. Start at `backend.py`; a
callable is in `planned_graph.py`, and `graph_program.py` makes a module with parameters of a graph, and its first
program.
"""
