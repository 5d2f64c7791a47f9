"""Loads a model named on the command line: `FILE.py:FACTORY` or `package.module:FACTORY`.

The factory takes no arguments and returns `(model, example_inputs)` or `(model, example_inputs, example_kwargs)`, which
mean what they mean in `memplan.plan` (see `memplan.core.arguments`): `memplan.plan(*factory())` is the same plan. An
exception in it is shown with the user's own source line, not memplan's.
"""

from __future__ import annotations

import hashlib
import importlib
import importlib.util
import inspect
import linecache
import os
import sys
import sysconfig
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any

from memplan.core.arguments import arguments_of
from memplan.core.extras import require_torch
from memplan.errors import InvalidModel, MemplanError

_FORM = "name it FILE.py:FACTORY or package.module:FACTORY, where FACTORY() returns (model, example_inputs)"
_LONGEST = 2000
_MEMPLAN = str(Path(__file__).resolve().parent)
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The result of a factory: `model(*args, **kwargs)` is the call to plan. `file` defines the factory."""

    name: str
    file: str
    model: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedFactory:
    """A factory that was found: `file` defines it, and it has an argument named batch if `takes_batch`."""

    name: str
    file: str
    make: Callable[..., Any]
    takes_batch: bool

    def call(self, batch: int | None = None) -> NamedModel:
        """Return its result for a batch (None: its own). Raises `InvalidModel`, with the user's own source line."""
        try:
            returned = self.make() if batch is None else self.make(batch=batch)
        except (Exception, SystemExit) as error:
            raise blame(error, f"{self.name.rpartition(':')[2]}() failed", file=self.file) from error
        return _named(self.name, self.file, returned)


def names_model(target: str) -> bool:
    """Return whether `target` has the form of a model's name: a module or file, a colon and an identifier."""
    module, colon, factory = target.rpartition(":")
    return bool(colon and module and factory.isidentifier())


def load_model(target: str) -> NamedModel:
    """Import the file or module that `target` names, call the factory and return its result. Runs the user's code.

    Raises the errors of `load_factory`, and `InvalidModel` if the factory raises or returns something else.
    """
    return load_factory(target).call()


def load_factory(target: str) -> NamedFactory:
    """Import the file or module that `target` names, and return the factory. Runs the user's code.

    The folder of FILE.py (or the working directory, for a module) comes first in `sys.path`, as when Python runs it.
    Raises `InvalidModel` if the file, module or name does not exist, or the user's code raises; `TorchNotInstalled`
    where torch is not installed, before any code runs.
    """
    if not names_model(target):
        raise InvalidModel("does not name a model", where=target or "''", hint=_FORM)
    require_torch(target)
    source, _, name = target.rpartition(":")
    is_file = source.endswith(".py") or os.sep in source
    if not is_file and not all(part.isidentifier() for part in source.split(".")):
        raise InvalidModel(f"{source!r} is neither a Python file nor the name of a module", where=target, hint=_FORM)
    module = _import_file(Path(source)) if is_file else _import_module(source)
    file = getattr(module, "__file__", None) or source
    factory = getattr(module, name, None)
    if not callable(factory):
        what = "is not a function" if hasattr(module, name) else "there is no such name"
        raise InvalidModel(f"{name}: {what}", where=source, hint=_other_names(module))
    return NamedFactory(name=target, file=file, make=factory, takes_batch=_takes_batch(factory, name, source))


def _import_file(path: Path) -> ModuleType:
    if not path.is_file():
        raise InvalidModel("there is no such file", where=str(path), hint=_FORM)
    path = path.resolve()
    # A unique module name, so that a file `torch.py`, or two files `model.py`, are not taken for each other.
    name = f"_memplan_{path.stem}_{hashlib.sha256(str(path).encode()).hexdigest()[:8]}"
    spec = importlib.util.spec_from_file_location(name, path)
    if spec is None or spec.loader is None:
        raise InvalidModel("is not a Python file", where=str(path), hint=_FORM)
    _put_on_path(str(path.parent))
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except (Exception, SystemExit) as error:
        del sys.modules[name]
        raise blame(error, "cannot be imported", file=str(path)) from error
    return module


def _import_module(name: str) -> ModuleType:
    _put_on_path(os.getcwd())
    try:
        return importlib.import_module(name)
    except ModuleNotFoundError as error:
        if error.name is None or not f"{name}.".startswith(f"{error.name}."):
            raise blame(error, "cannot be imported", file=name) from error
        raise InvalidModel(f"there is no module {error.name!r}", where=name, hint=_FORM) from error
    except (Exception, SystemExit) as error:
        raise blame(error, "cannot be imported", file=name) from error


def _takes_batch(factory: Callable[..., Any], name: str, source: str) -> bool:
    """Return whether a factory has an argument named batch. Raises `InvalidModel` if it needs any argument."""
    try:
        signature = inspect.signature(factory)
    except (TypeError, ValueError):  # a builtin without a signature; calling it shows whether it needs arguments
        return False
    try:
        signature.bind()
    except TypeError as error:
        hint = "give every argument of the factory a default"
        raise InvalidModel(f"{name}: needs arguments: {signature}", where=source, hint=hint) from error
    batch = signature.parameters.get("batch")
    return batch is not None and batch.kind in (batch.POSITIONAL_OR_KEYWORD, batch.KEYWORD_ONLY)


def _put_on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def _other_names(module: ModuleType) -> str:
    names = [
        name
        for name, value in vars(module).items()
        if not name.startswith("_") and callable(value) and getattr(value, "__module__", None) == module.__name__
    ]
    return f"it has {', '.join(names[:8])}" if names else _FORM


def _named(target: str, file: str, returned: object) -> NamedModel:
    if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
        raise _wrong(target, f"returned {_kind(returned)}")
    model, inputs, kwargs = (*returned, None)[:3]
    if not callable(model):
        raise _wrong(target, f"returned {_kind(model)} as the model, which cannot be called")
    try:
        args, keywords = arguments_of(inputs, kwargs)
    except MemplanError as error:
        given = inputs if kwargs is None else kwargs
        what = f"returned {_kind(given)} as keyword arguments, not a dict with names as keys"
        raise _wrong(target, what) from error
    return NamedModel(name=target, file=file, model=model, args=args, kwargs=keywords)


def _wrong(target: str, what: str) -> InvalidModel:
    return InvalidModel(what, where=target, hint="the factory must return (model, example_inputs)")


def _kind(value: object) -> str:
    if value is None:
        return "None"
    count = f" of {len(value)} items" if isinstance(value, (tuple, list)) else ""
    return f"an object of type {type(value).__name__}{count}"


def blame(error: BaseException, what: str, *, file: str) -> MemplanError:
    """Return an exception of the user's code as a `MemplanError` that shows the user's source line.

    `what` failed. The line is the last one of `file` in the traceback, or else the last one that is neither in a
    library nor in memplan. A `MemplanError` is returned unchanged.
    """
    if isinstance(error, MemplanError):
        return error
    where, line = _place(error, file)
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    shown = f"\n  > {line}" if line else ""
    return InvalidModel(f"{what}: {text}{shown}", where=where)


def _place(error: BaseException, file: str) -> tuple[str, str]:
    if isinstance(error, SyntaxError) and error.filename:
        return f"{_short(error.filename)}:{error.lineno}", (error.text or "").strip()
    frames = [(frame.filename, frame.lineno) for frame in traceback.extract_tb(error.__traceback__)]
    own = [f for f in frames if _same(f[0], file)] or [f for f in frames if not _is_library(f[0])]
    if not own:
        return _short(file), ""
    name, number = own[-1]
    return f"{_short(name)}:{number}", linecache.getline(name, number or 0).strip()


def _same(one: str, two: str) -> bool:
    return os.path.realpath(one) == os.path.realpath(two)


def _is_library(file: str) -> bool:
    return file.startswith(("<", _MEMPLAN, *_LIBRARIES)) or "site-packages" in file


def _short(file: str) -> str:
    """Return a path relative to the working directory if it is below it, otherwise unchanged."""
    return next(_relative(file), file)


def _relative(file: str) -> Iterator[str]:
    path, here = Path(file), Path.cwd()
    if path.is_absolute() and path.is_relative_to(here):
        yield str(path.relative_to(here))
