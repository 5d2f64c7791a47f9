"""Limits and baselines: `memplan check` and the pytest plugin compare plans with them.

In: a `Plan` and rules. Out: a `Verdict`. Start at `check.py`; `baseline.py` reads and
writes the committed figures, `project.py` reads pyproject.toml.
"""
