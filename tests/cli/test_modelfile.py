"""Models named on a command line; what goes wrong in the user's code is shown as the user's."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest

from memplan.cli.source import blame, load_model, names_model
from memplan.errors import InvalidModel

SOURCE = """\
import helper_beside_it

def model(*args, **kwargs):
    return args, kwargs

def pair(): return model, (1, 2)
def listed(): return [model, [1, 2]]
def single(): return model, 3
def keywords(): return model, {"x": 1}
def triple(): return model, (1,), {"x": 2}
def raises():
    value = helper_beside_it.fail()
    return value
def leaves(): raise SystemExit("bye")
def none(): pass
def number(): return 3
def four(): return 1, 2, 3, 4
def no_model(): return "model", ()
def bad_keywords(): return model, (), {1: 2}
def wants(argument): return model, ()
value = 3
"""
HELPER = """\
def fail():
    raise ValueError("the user's message")
"""


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with model_file.py and what it imports; sys.path and sys.modules are as before afterwards."""
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.setattr(sys, "modules", dict(sys.modules))
    monkeypatch.chdir(tmp_path)
    (tmp_path / "model_file.py").write_text(SOURCE)
    (tmp_path / "helper_beside_it.py").write_text(HELPER)
    return tmp_path


@pytest.mark.parametrize("target", ["a.py:f", "pkg.mod:f", "/x/y.py:make", "C:\\x.py:make"])
def test_names_of_models(target: str) -> None:
    assert names_model(target)


@pytest.mark.parametrize("target", ["", "a.py", "plan.json", "a.py:", ":f", "a.py:f()", "a.py:1", "a.py:f g"])
def test_what_names_no_model(target: str) -> None:
    assert not names_model(target)
    with pytest.raises(InvalidModel, match=r"FILE\.py:FACTORY"):
        load_model(target)


@pytest.mark.parametrize(
    ("factory", "args", "kwargs"),
    [
        ("pair", (1, 2), {}),
        ("listed", ([1, 2],), {}),
        ("single", (3,), {}),
        ("keywords", (), {"x": 1}),
        ("triple", (1,), {"x": 2}),
    ],
)
@pytest.mark.parametrize("source", ["model_file.py", "./model_file.py", "model_file", "{folder}/model_file.py"])
def test_what_a_factory_may_return(
    folder: Path, source: str, factory: str, args: tuple[Any, ...], kwargs: dict[str, int]
) -> None:
    named = load_model(f"{source.format(folder=folder)}:{factory}")
    assert named.model(*named.args, **named.kwargs) == (args, kwargs)
    assert Path(named.file).resolve() == folder / "model_file.py"


@pytest.mark.parametrize(
    ("factory", "message"),
    [
        ("none", "returned None"),
        ("number", "returned an object of type int"),
        ("four", "returned an object of type tuple of 4 items"),
        ("no_model", "returned an object of type str as the model"),
        ("bad_keywords", "as keyword arguments"),
        ("wants", "wants: needs arguments: missing a required argument: 'argument'"),
        ("value", "value: is not a function(.|\n)*it has model, pair"),
        ("missing", "missing: there is no such name(.|\n)*it has model, pair"),
        ("leaves", r"model_file\.py:14: leaves\(\) failed: SystemExit: bye"),
    ],
)
def test_what_is_wrong_with_a_factory_is_said(folder: Path, factory: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        load_model(f"model_file.py:{factory}")


def test_an_exception_in_the_factory_shows_the_users_line(folder: Path) -> None:
    with pytest.raises(InvalidModel) as caught:
        load_model("model_file.py:raises")
    text = str(caught.value)
    assert "model_file.py:12: raises() failed: ValueError: the user's message" in text
    assert "> value = helper_beside_it.fail()" in text
    assert "memplan" not in text.replace("_memplan", "")


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("def f(:\n", r"broken\.py:1: cannot be imported: SyntaxError"),
        ("x = 1\nraise RuntimeError('at import')\n", r"broken\.py:2: cannot be imported: RuntimeError: at import"),
        ("import sys\nsys.exit()\n", r"broken\.py:2: cannot be imported: SystemExit"),
        ("import no_such_module_at_all\n", r"broken\.py:1: cannot be imported: ModuleNotFoundError"),
        ("x = '\x00'\n", r"broken.*: cannot be imported: (SyntaxError|ValueError)"),
    ],
)
def test_a_file_that_cannot_be_imported(folder: Path, source: str, message: str) -> None:
    (folder / "broken.py").write_text(source)
    for target in ("broken.py:f", "broken:f"):
        with pytest.raises(InvalidModel, match=message):
            load_model(target)
    assert not [name for name in sys.modules if name.startswith("_memplan_broken")]


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("nothing.py:f", "nothing.py: there is no such file"),
        ("no_such_package.inner:f", "there is no module 'no_such_package'"),
        ("xml.no_such_part:f", r"there is no module 'xml\.no_such_part'"),
    ],
)
def test_what_is_not_there_is_said(folder: Path, target: str, message: str) -> None:
    with pytest.raises(InvalidModel, match=message):
        load_model(target)


def test_files_of_one_name_do_not_stand_in_for_each_other(folder: Path) -> None:
    for name in ("one", "two"):
        (folder / name).mkdir()
        (folder / name / "torch.py").write_text(f"def make(): return (lambda: {name!r}), ()\n")
    assert [load_model(f"{name}/torch.py:make").model() for name in ("one", "two")] == ["one", "two"]
    assert load_model("one/torch.py:make").model() == "one"


def test_our_own_errors_pass_unchanged_and_long_ones_are_cut() -> None:
    ours = InvalidModel("what")
    assert blame(ours, "planning failed", file="x.py") is ours
    assert len(str(blame(ValueError("x" * 10**6), "planning failed", file="x.py"))) < 3000
    assert str(blame(ValueError(), "planning failed", file="x.py")) == "x.py: planning failed: ValueError"
