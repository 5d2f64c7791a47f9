"""What a plan says about its memory: who holds it, when it is used, what changed, what would help. `Plan` in, data out.

Start at `holders.py` (who is alive), then `figures.py` (the few numbers that checks compare), `explain.py`, `diff.py`,
`advice.py` and `forecast.py`. `report/` draws what is computed here.
"""
