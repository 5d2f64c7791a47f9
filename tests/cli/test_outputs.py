"""Where a command writes: refused before anything is computed when it would overwrite what someone needs."""

from __future__ import annotations

import io
import sys
from pathlib import Path

import pytest

from tests.cli.helpers import CSV, Run

MODEL = "raise SystemExit('this model was imported')\n"
BAD = "id,lower,upper,size\na,0,1,-5\n"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Inputs that no command can read: an error that names an output came before they were read."""
    for name, text in (("mine.py", MODEL), ("other.py", MODEL), ("in.json", "{"), ("b.csv", BAD), ("costs.json", "{")):
        (tmp_path / name).write_text(text)
    (tmp_path / "link.json").symlink_to("in.json")
    (tmp_path / "sub").mkdir()
    return tmp_path


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["report", "mine.py:f", "--save", "mine.py"], "--save: mine.py is what the command reads"),
        (["report", "mine.py:f", "--html", "sub/../mine.py"], "--html: sub/../mine.py is what the command reads"),
        (["report", "mine:f", "--html", "mine.py"], "--html: mine.py is Python source"),
        (["report", "mine.py:f", "--svg", "other.py"], "--svg: other.py is Python source"),
        (["report", "in.json", "--html", "in.json"], "--html: in.json is what the command reads"),
        (["report", "link.json", "--html", "in.json"], "--html: in.json is what the command reads"),
        (["report", "in.json", "--snapshot", "link.json"], "--snapshot: link.json is what the command reads"),
        (["report", "in.json", "--html", "x", "--svg", "x"], "--svg: x is what --html writes too"),
        (["report", "in.json", "--save", "x", "--svg", "./x"], "--svg: x is what --save writes too"),
        (["report", "mine.py:f", "--costs", "costs.json", "--svg", "costs.json"], "--svg: costs.json is what the"),
        (["report", "in.json", "--html", "."], ".: cannot be written: it is a folder"),
        (["report", "in.json", "--svg", "no/x.svg"], "no/x.svg: cannot be written: there is no folder no\n"),
        (["report", "in.json", "--svg", "b.csv/x.svg"], "b.csv/x.svg: cannot be written: b.csv is not a folder"),
        (["report", "in.json", "--save", "no/x.json"], "cannot be written: there is no folder no\n"),
        (["budget", "in.json", "--html", "in.json"], "--html: in.json is what the command reads"),
        (["diff", "in.json", "b.json", "--html", "in.json"], "--html: in.json is what the command reads"),
        (["budget", "mine.py:f", "--costs", "costs.json", "--html", "costs.json"], "--html: costs.json is what the"),
        (["solve", "b.csv", "-o", "b.csv"], "--output: b.csv is what the command reads"),
        (["solve", "b.csv", "-o", "x.svg", "--plot", "x.svg"], "--plot: x.svg is what --output writes too"),
        (["solve", "b.csv", "-o", "sub"], "sub: cannot be written: it is a folder"),
        (["check", "in.json", "--baseline", "in.json", "--update-baseline"], "--baseline: in.json is what the"),
        (["check", "mine.py:f", "--baseline", "mine.py", "--update-baseline"], "--baseline: mine.py is what the"),
        (["check", "in.json", "--baseline", "no/b.json", "--update-baseline"], "cannot be written: there is no folder"),
    ],
)
def test_what_would_be_overwritten_is_refused_before_anything_is_read(
    run: Run, folder: Path, args: list[str], message: str
) -> None:
    before = {path: path.read_bytes() for path in folder.iterdir() if path.is_file()}
    code, out, err = run(*args)
    assert (code, out) == (2, "")
    assert message in err
    assert "next step" in err
    assert {path: path.read_bytes() for path in folder.iterdir() if path.is_file()} == before


def test_earlier_outputs_are_replaced_and_links_followed(run: Run, plan_file: Path, tmp_path: Path) -> None:
    (tmp_path / "old.html").write_text("old")
    (tmp_path / "link.html").symlink_to("old.html")
    assert run("report", plan_file, "--html", "link.html", "--svg", "/dev/null")[0] == 0
    assert (tmp_path / "link.html").is_symlink()
    assert (tmp_path / "old.html").read_text().startswith("<!doctype html>")
    assert Path("/dev/null").is_char_device()


@pytest.fixture
def stdin(monkeypatch: pytest.MonkeyPatch) -> io.BytesIO:
    """What the command reads from standard input, to be written into."""
    content = io.BytesIO()
    monkeypatch.setattr(sys, "stdin", io.TextIOWrapper(content))
    return content


def test_solve_reads_standard_input(run: Run, tmp_path: Path, stdin: io.BytesIO) -> None:
    stdin.write(CSV.encode())
    stdin.seek(0)
    code, out, err = run("solve", "-", "-o", "out.csv", "--plot", "p.svg")
    assert code == 0
    assert err.startswith("wrote out.csv (61 B)\nwrote p.svg (")
    assert "48 B" in out
    assert "standard input: 3 buffers" in (tmp_path / "p.svg").read_text()
    assert (tmp_path / "out.csv").read_text().startswith("id,lower,upper,size,offset\na,")


def test_errors_in_standard_input_name_the_line(run: Run, stdin: io.BytesIO) -> None:
    stdin.write(BAD.encode())
    stdin.seek(0)
    code, out, err = run("solve", "-")
    assert (code, out) == (2, "")
    assert "error: standard input:2: size is -5\n" in err
