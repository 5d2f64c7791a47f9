"""Writes a picture to a file, one function for each format."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path

from memplan.core.files import write_atomic
from memplan.errors import InvalidSize
from memplan.report.picture import Picture


def write_html(path: Path, picture: Picture, links: Mapping[str, str] | None = None) -> None:
    """Write a picture as one self-contained HTML page; `links` are addresses by source line."""
    from memplan.report.html import picture_html

    write_atomic(path, picture_html(picture, links=links))


def write_svg(path: Path, picture: Picture) -> None:
    """Write a picture as SVG."""
    from memplan.report.svg import picture_svg

    write_atomic(path, picture_svg(picture))


def write_trace(path: Path, picture: Picture) -> None:
    """Write a picture as Chrome trace events."""
    from memplan.report.trace_events import trace_events

    write_atomic(path, json.dumps(trace_events(picture), separators=(",", ":"), allow_nan=False) + "\n")


def write_snapshot(path: Path, picture: Picture) -> None:
    """Write a picture as a pickle for PyTorch's memory_viz."""
    from memplan.report.snapshot import snapshot_bytes

    write_atomic(path, snapshot_bytes(picture))


def write_png(path: Path, picture: Picture) -> None:
    """Write a picture as PNG; needs Pillow."""
    from memplan.report.png import picture_png

    write_atomic(path, picture_png(picture))


WRITERS: dict[str, Callable[[Path, Picture], None]] = {".html": write_html, ".svg": write_svg, ".png": write_png}


def writer_for(option: str, path: Path) -> Callable[[Path, Picture], None]:
    """Return the function that writes a file with this suffix. Raises `InvalidSize` for an unknown suffix."""
    try:
        return WRITERS[path.suffix.lower()]
    except KeyError:
        raise InvalidSize(f"{path.name!r} ends in none of {', '.join(WRITERS)}", where=option) from None
