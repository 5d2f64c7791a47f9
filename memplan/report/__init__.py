"""Reports: renders plans, analyses and verdicts as text, tables, markdown, JSON, HTML, SVG, PNG and traces.

In: a `Plan`, or the results of `analysis/` and `check/`. Out: texts and files. Start at `summary.py`, the figures of a
plan; `lines.py` words them; `picture.py` holds what the drawings show; every other file renders one format.
`page_parts.py` puts the HTML pages together from the files in `page/`: a frame (`shell.html`), for each page a body and
a start script (`report.html`, `start_report.js`), and the scripts that they share.
"""
