"""Turns the target that the user named into a plan: loads a saved plan, or imports a model and plans it.

A model is named `FILE.py:FACTORY` or `package.module:FACTORY`. The factory takes no arguments and returns
`(model, example_inputs)` or `(model, example_inputs, example_kwargs)`, which mean what they mean in `memplan.plan` (see
`memplan.core.arguments`): `memplan.plan(*factory())` is the same plan. An exception in it is shown with the user's own
source line, not memplan's.
"""

from __future__ import annotations

import contextlib
import dataclasses
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import TYPE_CHECKING, Any

from memplan.cli.console import stages
from memplan.core.arguments import arguments_of, require_torch
from memplan.core.units import parse_size
from memplan.errors import InvalidModel, MemplanError, located
from memplan.planning.options import DEFAULTS, PlanOptions

if TYPE_CHECKING:
    from memplan.core.plan import Plan

_FORM = "name it FILE.py:FACTORY or package.module:FACTORY, where FACTORY() returns (model, example_inputs)"
_LONGEST = 2000
_MEMPLAN = str(Path(__file__).resolve().parent)


def is_model(target: str) -> bool:
    """Return whether `target` names a model; an existing file of that name is taken as a saved plan."""
    return names_model(target) and not os.path.isfile(target)


def names_model(target: str) -> bool:
    """Return whether `target` has the form of a model's name: a module or file, a colon and an identifier."""
    module, colon, factory = target.rpartition(":")
    return bool(colon and module and factory.isidentifier())


def require_model(target: str, has_options: bool) -> None:
    """Raise `InvalidModel` if there are options for planning, and `target` is no model."""
    if has_options and not is_model(target):
        what = "is a saved plan: options for planning, such as --infer, --ranks, --budget and --costs, are for models"
        raise InvalidModel(what, where=target, hint="leave them out, or name the model as FILE.py:FACTORY")


def obtain(
    target: str,
    *,
    infer: bool = False,
    options: PlanOptions = DEFAULTS,
    ranks: int | None = None,
    gpu: str | None = None,
    optimizer: str = "none",
) -> Plan:
    """Return the plan of `target`, a plan file or a model's name. torch is imported for a model only.

    `ranks`: the model's factory runs as the first of so many ranks, and may divide the model among them. `gpu`: the
    plan is for this GPU, which need not be there. `optimizer`: its state counts in a budget, unless `options` have a
    reserve.
    """
    if not is_model(target):
        require_model(target, infer or gpu is not None or ranks is not None or options != DEFAULTS)
        return _saved(target)
    with contextlib.ExitStack() as ranked:
        if ranks is not None:
            from memplan.trace import fake_ranks

            ranked.enter_context(fake_ranks(ranks))
        with traced(target, "Planning") as named:
            if options.has_budget and not (options.reserved or infer):
                options = dataclasses.replace(options, reserve=_state(named.model, optimizer, ranks or 1))
            how: dict[str, Any] = {"train": False if infer else None, "options": options, "ranks": ranks}
            asked = named.model, named.args, dict(named.kwargs) or None
            try:
                if gpu is None:
                    from memplan.trace import plan as plan_model  # the only imports here that import torch

                    plan = plan_model(*asked, **how)
                else:
                    from memplan.trace.for_target import plan_for

                    plan = plan_for(gpu, *asked, **how)
            except Exception as error:
                raise blame(error, "planning failed", file=named.file) from error
    return dataclasses.replace(plan, model=target)


def _state(model: Any, optimizer: str, ranks: int) -> int:
    """Return the bytes that an optimizer keeps of what a rank has of the parameters that a model trains."""
    from memplan.analysis.needs import STATES, named_optimizer

    trained = [p for p in model.parameters() if p.requires_grad] if getattr(model, "training", False) else []
    local = (getattr(p, "_local_tensor", None) for p in trained)
    sizes = (p.nbytes // ranks if own is None else own.nbytes for p, own in zip(trained, local, strict=True))
    return STATES[named_optimizer(optimizer)] * int(sum(sizes))


def _saved(target: str) -> Plan:
    from memplan.planning.planfile import load

    if target.endswith(".py"):
        raise InvalidModel("names a file, and no factory in it", where=target, hint=f"write {target}:FACTORY")
    if not target.endswith(".json") and not os.path.isfile(target):
        hint = "give plan.json, FILE.py:FACTORY or package.module:FACTORY"
        raise InvalidModel("is neither a plan file nor the name of a model", where=target, hint=hint)
    with stages(f"Loading {target}"):
        return load(target)


@contextlib.contextmanager
def traced(target: str, doing: str) -> Iterator[NamedModel]:
    """Yield the named model, and hold back all output: it goes to stderr after success, and is dropped after an error.

    torch logs tracebacks and prints graphs for what it cannot trace, which the raised error says better.
    """
    with stages(f"Importing {target}"), contextlib.redirect_stdout(sys.stderr):
        named = load_model(target)
    before, printed = logging.root.manager.disable, io.StringIO()
    with stages(f"{doing} {target}"):
        logging.disable(logging.CRITICAL)
        try:
            with contextlib.redirect_stdout(printed), contextlib.redirect_stderr(printed):
                yield named
        finally:
            logging.disable(before)
    sys.stderr.write(printed.getvalue())


def size_option(name: str, text: str | None, *, bare: bool = False) -> int | None:
    """Return the bytes that an option's text describes. Raises `InvalidSize`, which names the option."""
    with located(name):
        return None if text is None else parse_size(text, bare=bare)


# -- models --------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, kw_only=True)
class NamedModel:
    """The result of a factory: `model(*args, **kwargs)` is the call to plan. `file` defines the factory."""

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
        if not isinstance(returned, (tuple, list)) or len(returned) not in (2, 3):
            raise self._wrong(returned, "")
        model, inputs, kwargs = (*returned, None)[:3]
        if not callable(model):
            raise self._wrong(model, " as the model, which cannot be called")
        try:
            args, keywords = arguments_of(inputs, kwargs)
        except MemplanError as error:
            given = inputs if kwargs is None else kwargs
            raise self._wrong(given, " as keyword arguments, not a dict with names as keys") from error
        return NamedModel(file=self.file, model=model, args=args, kwargs=keywords)

    def _wrong(self, value: object, what: str) -> InvalidModel:
        count = f" of {len(value)} items" if isinstance(value, (tuple, list)) else ""
        kind = "None" if value is None else f"an object of type {type(value).__name__}{count}"
        hint = "the factory must return (model, example_inputs)"
        return InvalidModel(f"returned {kind}{what}", where=self.name, hint=hint)


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
    factory = getattr(module, name, None)
    if not callable(factory) or (hasattr(factory, "forward") and not isinstance(factory, type)):
        public = {key: value for key, value in vars(module).items() if not key.startswith("_") and callable(value)}
        own = [key for key, value in public.items() if getattr(value, "__module__", None) == module.__name__]
        what = "is not a function" if hasattr(module, name) else "there is no such name"
        near = difflib.get_close_matches(name, own, n=1)
        hint = f"did you mean {source}:{near[0]}? " if near else ""
        hint += f"it has {', '.join(own[:8])}" if own else _FORM
        raise InvalidModel(f"{name}: {what}", where=source, hint=hint)
    try:
        signature = inspect.signature(factory)
        signature.bind()
        batch = signature.parameters.get("batch")
    except ValueError:  # a builtin without a signature; calling it shows whether it needs arguments
        batch = None
    except TypeError as error:
        hint = "give every argument of the factory a default"
        raise InvalidModel(f"{name}: needs arguments: {error}", where=source, hint=hint) from error
    takes = batch is not None and batch.kind in (batch.POSITIONAL_OR_KEYWORD, batch.KEYWORD_ONLY)
    return NamedFactory(name=target, file=getattr(module, "__file__", None) or source, make=factory, takes_batch=takes)


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
    sys.modules[name] = module = importlib.util.module_from_spec(spec)
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
    except (Exception, SystemExit) as error:
        missing = error.name if isinstance(error, ModuleNotFoundError) else None
        if missing is not None and f"{name}.".startswith(f"{missing}."):
            raise InvalidModel(f"there is no module {missing!r}", where=name, hint=_FORM) from error
        raise blame(error, "cannot be imported", file=name) from error


def _put_on_path(folder: str) -> None:
    if folder not in sys.path:
        sys.path.insert(0, folder)


def blame(error: BaseException, what: str, *, file: str) -> MemplanError:
    """Return an exception of the user's code as a `MemplanError` that shows the user's source line.

    `what` failed. The line is the last one of `file` in the traceback, or else the last one of any file. A
    `MemplanError` is returned unchanged.
    """
    if isinstance(error, MemplanError):
        return error
    text = f"{type(error).__name__}: {error}".strip().removesuffix(":")
    text = text if len(text) <= _LONGEST else text[:_LONGEST] + " ..."
    frames = [f for f in traceback.extract_tb(error.__traceback__) if not f.filename.startswith(("<", _MEMPLAN))]
    own = [f for f in frames if os.path.realpath(f.filename) == os.path.realpath(file)] or frames
    name, number, line = (own[-1].filename, own[-1].lineno, own[-1].line) if own else (file, None, "")
    if isinstance(error, SyntaxError):
        name, number, line = error.filename or file, error.lineno, (error.text or "").strip()
    path, here = Path(name), Path.cwd()
    short = str(path.relative_to(here)) if path.is_absolute() and path.is_relative_to(here) else name
    shown = f"\n  > {line}" if line else ""
    return InvalidModel(f"{what}: {text}{shown}", where=short if number is None else f"{short}:{number}")
