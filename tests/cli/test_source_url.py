"""Links of source lines on pages: into the editor, or by a template of the user's."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.cli.helpers import Run, embedded_data

CODE = "\n".join(f"line = {i}" for i in range(20)) + "\n"


def _links(folder: Path) -> dict[str, str]:
    data = embedded_data((folder / "r.html").read_text())
    return {data["words"][int(word)]: link for word, link in data["links"].items()}


def test_lines_of_local_files_open_the_editor(run: Run, plan_file: Path, tmp_path: Path) -> None:
    (tmp_path / "a b").mkdir()
    (tmp_path / "a b" / "model.py").write_text(CODE)
    assert run("report", plan_file, "--html", "r.html")[0] == 0
    folder = str(tmp_path.resolve())
    wanted = {f"model.py:{line}": f"vscode://file{folder}/a%20b/model.py:{line}" for line in (12, 15)}
    assert _links(tmp_path) == wanted


@pytest.mark.parametrize("command", ["report", "diff"])
def test_a_template_makes_addresses(run: Run, plan_file: Path, tmp_path: Path, command: str) -> None:
    (tmp_path / "net").mkdir()
    (tmp_path / "net" / "model.py").write_text(CODE)
    template = "https://host/blob/main/{path}?name={file}#L{line}"
    files = [plan_file] * (2 if command == "diff" else 1)
    assert run(command, *files, "--html", "r.html", "--source-url", template)[0] == 0
    data = embedded_data((tmp_path / "r.html").read_text())
    for part in data["plans"] if command == "diff" else [data]:
        links = {part["words"][int(word)]: link for word, link in part["links"].items()}
        assert links["model.py:12"] == "https://host/blob/main/net/model.py?name=model.py#L12"


@pytest.mark.parametrize("command", ["report", "diff", "budget"])
@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("https://host/main", "has neither {path} nor {file}"),
        ("https://host/#L{line}", "has neither {path} nor {file}"),
        ("https://host/{name}#L{line}", "has a brace that is not of {path}, {file} or {line}"),
        ("https://host/{}", "has a brace that is not of {path}, {file} or {line}"),
        ("https://host/{path.__class__}", "has a brace that is not of {path}, {file} or {line}"),
        ("https://host/{path!r}", "has a brace that is not of {path}, {file} or {line}"),
        ("https://host/{path", "has a brace that is not of {path}, {file} or {line}"),
        ("host/{path}", "is no address of a file"),
        ("javascript:alert({path})", "is no address of a file"),
        ("", "has neither"),
    ],
)
def test_a_bad_template_is_bad_input_and_nothing_is_written(
    run: Run, plan_file: Path, command: str, template: str, message: str
) -> None:
    files = [plan_file] * (2 if command == "diff" else 1)
    code, out, err = run(command, *files, "--html", "r.html", "--source-url", template)
    assert (code, out) == (2, "")
    assert message in err
    assert "next step" in err
    assert not Path("r.html").exists()


def test_a_template_without_a_page_is_bad_input(run: Run, plan_file: Path) -> None:
    code, _, err = run("report", plan_file, "--source-url", "https://host/{path}")
    assert code == 2
    assert "give --html FILE too" in err
