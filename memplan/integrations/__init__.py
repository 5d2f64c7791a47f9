"""Callbacks for trainers of other libraries: each compiles the model when training starts, and logs its plans.

`memplan.integrations.transformers.MemplanCallback` is for the Trainer of transformers, and
`memplan.integrations.lightning.MemplanCallback` for Lightning's. Each module imports its library, and raises
`LibraryNotInstalled` where that is missing. Start reading in `planned_training.py`, which both share.
"""
