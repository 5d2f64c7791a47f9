"""Renders the report as plain JSON types: every figure exact, in bytes, under the names of `Report`."""

from __future__ import annotations

from typing import Any

from memplan.core.jsonio import to_json
from memplan.report.summary import Report


def report_json(report: Report) -> dict[str, Any]:
    """Return the report as plain types; `format` names and numbers its layout."""
    data = to_json(report)
    data["versions"] = dict(report.versions)
    return {"format": "memplan-report-1", **data}
