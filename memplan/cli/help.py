"""`memplan help`: prints a page of the documentation, or what it says about an error; the text is in the wheel."""

from __future__ import annotations

import difflib
import re
from pathlib import Path
from typing import Annotated

import typer

from memplan.errors import UnknownName


def help_(
    topic: Annotated[str | None, typer.Argument(metavar="[TOPIC]", help="Named by an error; or a page.")] = None,
) -> None:
    """Print what the documentation says about an error, or one of its pages.

    Without a topic: the names of the pages.
    """
    root = Path(__file__).parents[1] / "docs"
    root = root if root.is_dir() else root.parents[1] / "docs"  # of a checkout
    folders = ("", "guides", "inside")
    pages = {path.stem: path for name in reversed(folders) for path in sorted((root / name).glob("*.md"))}
    if topic is None:
        typer.echo("\n".join(sorted(pages)))
        return
    found = _sections((root / "refused.md").read_text(encoding="utf-8")) if pages else {}
    texts = [found[topic]] if topic in found else []
    texts += [pages[topic].read_text(encoding="utf-8")] if topic in pages else []
    if not texts:
        near = difflib.get_close_matches(topic, [*found, *pages], n=3)
        hint = f"did you mean {' or '.join(near)}? " if near else ""
        what = "the documentation has no such topic"
        raise UnknownName(what, where=topic, hint=f"{hint}`memplan help` lists the pages")
    typer.echo("\n\n".join(text.strip() for text in texts))


def _sections(page: str) -> dict[str, str]:
    """Return the parts of a page under headings with ids, by id."""
    parts = re.split(r"^(?=#{2,3} )", page, flags=re.MULTILINE)
    named = ((re.search(r" *\{#([\w-]+)\}$", part.partition("\n")[0]), part) for part in parts)
    return {found[1]: part.replace(found[0], "", 1) for found, part in named if found}
