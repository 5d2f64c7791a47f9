"""From a scheduled graph to a `Plan`: evicted from where a budget asks for it, placed, checked, saved.

Start at `make_plan.py` (place), then `budget.py` (a budget in anyone's words, kept), `fit.py` (in bytes),
`multi_device.py` (one arena per device), `frontier.py` (many budgets), `consistency.py` and `planfile.py` (files).
"""
