"""The files with pictures that the command line writes."""

from __future__ import annotations

import json
import pickle
import xml.etree.ElementTree as ET
from pathlib import Path

from tests.cli.helpers import Run

SVG = "{http://www.w3.org/2000/svg}"


def test_the_command_line_writes_them_all(run: Run, plan_file: Path, tmp_path: Path) -> None:
    files = {"--html": "r.html", "--svg": "r.svg", "--trace": "r.json", "--snapshot": "r.pickle"}
    args = [word for option in files.items() for word in option]
    code, out, err = run("report", plan_file, *args, "--save", "plan2.json")
    assert code == 0
    assert [line.split()[:2] for line in err.splitlines()] == [
        ["wrote", file] for file in ("plan2.json", *files.values())
    ]
    assert out.startswith("sample")
    assert (tmp_path / "r.html").read_text().startswith("<!doctype html>")
    assert ET.parse(tmp_path / "r.svg").getroot().tag == f"{SVG}svg"
    assert json.loads((tmp_path / "r.json").read_text())["traceEvents"]
    assert pickle.loads((tmp_path / "r.pickle").read_bytes())["segments"]


def test_solve_plots(run: Run, csv_file: Path, tmp_path: Path) -> None:
    for name in ("p.svg", "p.html"):
        assert run("solve", csv_file, "--plot", name)[0] == 0
        assert "buffers.csv: 3 buffers" in (tmp_path / name).read_text()
    code, out, err = run("solve", csv_file, "--plot", "p.gif")
    assert (code, out) == (2, "")
    assert "ends in none of .html, .svg" in err
    code, _, err = run("solve", csv_file, "--plot", "q.svg", "--capacity", "40")
    assert code == 1
    assert "q.svg was not written" in err
