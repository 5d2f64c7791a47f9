"""Makes plans of scheduled graphs: evictions that keep a budget, placement in the arena, checks, plan files.

In: a `Graph` with its `Schedule`, and a budget. Out: a `Plan`. Start at `options.py` (what the user asks for) and
`make_plan.py` (place), then `budget.py` (keep a budget), `planner.py` (plans under limits of bytes), `fit.py` (one
limit of live bytes), `frontier.py` (many budgets) and `planfile.py` (files, and their checks). For several devices,
`multi_device.py` assigns ops to devices and places an arena on each, and `divide.py` adds the transfers.
"""
