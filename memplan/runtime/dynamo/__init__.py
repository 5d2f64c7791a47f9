"""The backend of `torch.compile(model, backend="memplan")`.

`backend.py` takes the graphs that dynamo traces, and returns callables that run them at planned addresses.
"""
