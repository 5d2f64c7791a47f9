"""What looks on while a step runs: `sanitizers.py` (poison, red zones), `hooks.py`, `tracker.py`."""
