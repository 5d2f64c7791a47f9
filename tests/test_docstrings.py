"""Public docstrings have their sections, all begin with what their subject is or does, and class names are unique."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Callable, Iterator
from functools import cached_property
from pathlib import Path
from typing import Any

import pytest

import memplan

PACKAGE = Path(memplan.__file__).parent
FIRST_WORDS = re.compile(r"(Of|As|By|Those|When|Until|Which|Where|How|Whose|What|For|The same)\b")
OUR_FILES = re.compile(r"DESIGN\.md|BEHAVIOURS\.md|FINDINGS\.md|\bshared/")
CANNOT_RAISE = {"diff"}  # any two plans can be compared
SHARED_OPTIONS = "The options that are not listed here are those of `memplan.compile`."


def _public() -> dict[str, Any]:
    names = {name: getattr(memplan, name) for name in memplan.__all__ if name not in ("__version__", "csvio")}
    csvio = {f"csvio.{name}": f for name, f in inspect.getmembers(memplan.csvio, inspect.isfunction) if name[0] != "_"}
    return {**names, **{name: f for name, f in csvio.items() if f.__module__ == memplan.csvio.__name__}}


FUNCTIONS = {name: thing for name, thing in _public().items() if inspect.isfunction(thing)}
CLASSES = {name: thing for name, thing in _public().items() if inspect.isclass(thing)}


def _own(kind: type) -> Iterator[tuple[str, Any]]:
    """Yield the public attributes that a class of memplan, or a base of memplan's, defines."""
    bases = [vars(base) for base in reversed(kind.__mro__) if base.__module__.startswith("memplan.")]
    for name, thing in {name: thing for base in bases for name, thing in base.items()}.items():
        if not name.startswith("_"):
            yield name, thing.__func__ if isinstance(thing, (classmethod, staticmethod)) else thing


METHODS = {
    f"{owner}.{name}": thing
    for owner, kind in CLASSES.items()
    for name, thing in _own(kind)
    if inspect.isfunction(thing) and thing.__module__.startswith("memplan.")
}
PROPERTIES = {
    f"{owner}.{name}": thing
    for owner, kind in CLASSES.items()
    for name, thing in _own(kind)
    if isinstance(thing, (property, cached_property))
}


def _sections(text: str) -> dict[str, str]:
    """Return the sections of a docstring ("Args", "Returns", ...), without their indentation."""
    found = re.split(r"^(Args|Attributes|Returns|Raises|Example):\n", inspect.cleandoc(text), flags=re.MULTILINE)
    return {name: inspect.cleandoc(body) for name, body in zip(found[1::2], found[2::2], strict=True)}


def _arguments(function: Callable[..., Any]) -> set[str]:
    return {name for name in inspect.signature(function).parameters if name not in ("self", "cls")}


def _described(section: str) -> set[str]:
    return set(re.findall(r"^(\w+): ", section, flags=re.MULTILINE))


def test_the_public_names_are_found() -> None:
    assert {"plan", "compile", "solve", "csvio.read_problem"} <= set(FUNCTIONS)
    assert {"Plan", "CompiledModule", "Backend"} <= set(CLASSES)
    assert {"Plan.save", "CompiledModule.train", "SymbolicPlan.resolve"} <= set(METHODS)
    assert {"Plan.total", "Problem.max_live", "Backend.arena_size"} <= set(PROPERTIES)


@pytest.mark.parametrize("name", [*FUNCTIONS, *METHODS])
def test_functions_describe_their_arguments_results_and_errors(name: str) -> None:
    function = {**FUNCTIONS, **METHODS}[name]
    sections, arguments = _sections(function.__doc__ or ""), _arguments(function)
    described = _described(sections.get("Args", ""))
    assert described <= arguments, "describes arguments that do not exist"
    assert described == arguments or SHARED_OPTIONS in (function.__doc__ or ""), "leaves arguments out"
    assert ("Returns" in sections) == (function.__annotations__["return"] != "None")
    assert "Example" in sections
    if name in FUNCTIONS and name not in CANNOT_RAISE:
        assert "Raises" in sections


@pytest.mark.parametrize("name", CLASSES)
def test_classes_describe_their_fields_and_show_an_example(name: str) -> None:
    sections = _sections(CLASSES[name].__doc__ or "")
    assert "Example" in sections
    assert {"Args", "Attributes"} & set(sections)


@pytest.mark.parametrize("name", PROPERTIES)
def test_properties_say_what_they_are(name: str) -> None:
    thing = PROPERTIES[name]
    getter = thing.fget if isinstance(thing, property) else thing.func
    assert getter is not None
    first = inspect.cleandoc(getter.__doc__ or "").split("\n\n")[0]
    assert first.endswith((".", ":"))
    if name.endswith(("_size", ".max_live", ".total", ".peak", ".padding", "_bytes")):
        assert "bytes" in first.lower(), "names no unit"


@pytest.mark.parametrize("path", sorted(PACKAGE.rglob("*.py")), ids=lambda path: str(path.relative_to(PACKAGE)))
def test_docstrings_begin_with_their_subject_and_cite_no_file_of_ours(path: Path) -> None:
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        text = ast.get_docstring(node) if isinstance(node, kinds) else None
        where = getattr(node, "name", "the module")
        assert text is None or FIRST_WORDS.match(text) is None, f"{where}: {text}"
        assert text is None or OUR_FILES.search(text) is None, f"{where} cites a file that users do not have"


def test_no_two_classes_share_a_name() -> None:
    homes: dict[str, list[str]] = {}
    for path in sorted(PACKAGE.rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if isinstance(node, ast.ClassDef):
                homes.setdefault(node.name, []).append(str(path.relative_to(PACKAGE)))
    assert {"Plan", "GraphInstance"} <= set(homes)
    callbacks = {f"integrations/{library}.py" for library in ("lightning", "transformers")}  # one for each library
    assert set(homes.pop("MemplanCallback")) == callbacks
    assert {name: paths for name, paths in homes.items() if len(paths) > 1} == {}
