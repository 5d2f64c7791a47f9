"""Puts a page together from its files in `page/`: one HTML file with its style, its script and its data."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping
from importlib import resources
from types import MappingProxyType
from typing import Any

from memplan.version import __version__

_FAILED = """function failed(error) {
  document.getElementById("verdict").textContent = `Not drawn, which takes a browser of 2023 or later: ${error}`;
  throw error;
}
"""

FOOT = f"memplan {__version__}. Everything in this file was computed before anything ran."

_SHARED = ("format", "data", "look", "theme", "view", "paint", "arena", "pins", "permalink")
_REPORT = ("tree", "table", "report")
SCRIPTS: Mapping[str, tuple[str, ...]] = MappingProxyType(
    {
        "report": (*_SHARED, *_REPORT, "start_report"),
        "budget": (*_SHARED, *_REPORT, "start_budget"),
        "diff": (*_SHARED, "compare", "start_diff"),
    }
)
"""The scripts of each page, in the order in which they run."""


def page(name: str, data: Mapping[str, Any]) -> str:
    """Return the page `name` ("report", "budget" or "diff") that shows `data`.

    Its policy lets this script run and nothing else: no other script, no address, no request.
    """
    body = _file(f"{name}.html")
    if name == "budget":  # a point of it opens the plan
        body = body.replace("__REPORT__", _file("report.html"))
    scripts = "\n".join(_file(f"{part}.js") for part in SCRIPTS[name])
    script = (
        '"use strict";\n(async () => {\nconst data = JSON.parse(document.getElementById("data").textContent);\n'
        f"{scripts}\n}})().catch(failed);\n{_FAILED}"
    )
    digest = base64.b64encode(hashlib.sha256(script.encode()).digest()).decode("ascii")
    parts = {"__HASH__": f"sha256-{digest}", "__STYLE__": _file("page.css"), "__BODY__": body, "__SCRIPT__": script}
    text = _file("shell.html")
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text.replace("__DATA__", embedded(data))


def embedded(data: Mapping[str, Any]) -> str:
    """Return JSON for a script element: characters of names that could end the element are escaped."""
    text = json.dumps(data, separators=(",", ":"), allow_nan=False)
    for mark in "<>&\u2028\u2029":
        text = text.replace(mark, f"\\u{ord(mark):04x}")
    return text


def _file(name: str) -> str:
    return resources.files("memplan.report").joinpath("page", name).read_text(encoding="utf-8")
