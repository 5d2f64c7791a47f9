"""Limits and baselines: `Plan` in, `Verdict` out. What `memplan check` and the pytest plugin run.

Start at `check.py`; `rules.py` reads limits, `baseline.py` the committed figures, `project.py` pyproject.toml.
"""
