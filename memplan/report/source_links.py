"""Makes addresses of source lines: for the editor, or by the user's own template."""

from __future__ import annotations

import re
from string import Formatter
from urllib.parse import quote

from memplan.errors import InvalidTemplate

_PATHS, _LINE = ("path", "file"), "line"
_HINT = "write one such as 'https://github.com/me/project/blob/main/{path}#L{line}'"
_SCHEME = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*):")
_RUNS_CODE = frozenset({"javascript", "data", "vbscript", "blob"})


def require_template(template: str, where: str = "source_url") -> str:
    """Return `template` if it is an address with {path} or {file}, and at most {line} besides.

    Raises `InvalidTemplate` for one without a placeholder or with another, and for one that is no address or runs code.
    """
    try:
        fields = [(name, spec, kind) for _, name, spec, kind in Formatter().parse(template) if name is not None]
    except ValueError as error:
        raise InvalidTemplate(f"{template!r} has a brace without its other one", where=where, hint=_HINT) from error
    unknown = next((name for name, spec, kind in fields if name not in (*_PATHS, _LINE) or spec or kind), None)
    if unknown is not None:
        what = f"{template!r} has the placeholder {{{unknown}}}; there are {{path}}, {{file}} and {{line}}"
        raise InvalidTemplate(what, where=where, hint=_HINT)
    if not any(name in _PATHS for name, _, _ in fields):
        raise InvalidTemplate(f"{template!r} has neither {{path}} nor {{file}}", where=where, hint=_HINT)
    scheme = _SCHEME.match(template)
    if scheme is None:
        raise InvalidTemplate(f"{template!r} is no address: it begins with no scheme", where=where, hint=_HINT)
    if scheme[1].lower() in _RUNS_CODE or not template.isprintable():
        raise InvalidTemplate(f"{template!r} is no address of a file", where=where, hint=_HINT)
    return template


def filled(template: str, source: str, path: str | None) -> str | None:
    """Return the address of a line by a template: of `source` ("model.py:12"), whose file is at `path`.

    Returns None where that is not known: for a source without a line, and for a template with {path} without a path.
    """
    name, _, line = source.rpartition(":")
    if not name or not (line.isascii() and line.isdecimal()) or (path is None and "{path}" in template):
        return None
    return template.format(path=quote(path or ""), file=quote(name), line=line)


def editor_link(source: str, file: str) -> str | None:
    """Return the address that opens a source line in VS Code; `file` is absolute, with slashes."""
    line = source.rpartition(":")[2]
    return f"vscode://file/{quote(file.lstrip('/'), safe='/:')}:{line}" if line.isascii() and line.isdecimal() else None
