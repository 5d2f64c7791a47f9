"""Reports: renders plans, analyses and verdicts as tables, markdown, JSON, HTML, SVG and snapshots.

In: a `Plan`, or the results of `analysis/` and `check/`. Out: texts and files. What is shown is one `Form` (a title,
sections, data for JSON): `lines.py` makes that of a plan's `Report` (`summary.py`), `verdicts.py` that of a check,
`forms.py` every other one; `sections.py` writes it as markdown, plain text or HTML, `terminal.py` for terminals. What
is drawn is one `Picture` (`picture.py`): `svg.py`, `memory_viz.py` and `pages.py` draw it. Pages are put together
from the files in `page/`: a frame (`shell.html`), for each page a body and a start script, and scripts that they share.
"""
