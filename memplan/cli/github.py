"""What GitHub Actions read: workflow commands on stdout, a job summary in a file."""

from __future__ import annotations

import os

from memplan.report.verdicts import escape_message, escape_property


def notice(title: str, text: str) -> str:
    """A workflow command that shows `text` on the run's page."""
    return f"::notice title={escape_property(title)}::{escape_message(text)}"


def add_summary(markdown: str) -> None:
    """Append to the job's summary; nothing happens outside of GitHub Actions. Raises `OSError`."""
    if summary := os.environ.get("GITHUB_STEP_SUMMARY"):
        with open(summary, "a", encoding="utf-8") as file:
            file.write(markdown)
