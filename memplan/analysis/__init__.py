"""Analyses of a plan: which buffers are alive, when they are used, what changed, what would save memory.

In: a `Plan` (`diff.py`: two). Out: frozen dataclasses, which `report/` renders. Start at `holders.py` (live buffers),
then `figures.py` (the figures that checks compare), `explain.py`, `diff.py`, `advice.py` and `forecast.py`.
"""
