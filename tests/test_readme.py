"""What the README shows is run: its Python blocks in order, its commands by name."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text(encoding="utf-8")


def _blocks(language: str) -> list[str]:
    return re.findall(rf"^```{language}\n(.*?)^```", README, flags=re.MULTILINE | re.DOTALL)


def test_every_python_block_runs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    namespace: dict[str, object] = {}
    blocks = _blocks("python")
    assert len(blocks) >= 3
    for block in blocks:
        exec(block, namespace)


def test_the_scripts_and_links_exist() -> None:
    scripts = re.findall(r"^(scripts/\S+)", "\n".join(_blocks("sh")), flags=re.MULTILINE)
    assert scripts
    links = re.findall(r"\]\((?!http)([^)]+)\)", README)
    assert links
    for path in [*scripts, *links]:
        assert (ROOT / path).exists(), path
