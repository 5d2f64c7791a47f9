"""Trace with sizes that vary (`dynamic_shapes=`): sizes become expressions of the user's symbols.

In: an `nn.Module`, example inputs and the dimensions that vary. Out: a `TracedGraph` for the example, and its sizes
as expressions. Start at `symbolic.py`. `dims.py` reads what varies, and has the result; `symbolic_capture.py` traces,
and `symbols.py` translates torch's symbols and guards.
"""
