"""Placements by one rule: what the portfolio starts from (`greedy.py`), what users may choose, what it is compared with."""
