"""What people see of a plan: figures first (`summary.py`), then one file per form that they take."""
