"""JSON and YAML files of a package. Every complaint names file, line, key, what was found and what was expected."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NoReturn

from genai_cli.errors import GenaiError

KeyPath = tuple[str | int, ...]
MAX_BYTES = 64 << 20  # the largest tokenizers have 30 MB; a config is never larger
LFS_MAGIC = "version https://git-lfs"
MISSING = object()
_SHOWN = 40  # characters of a bad value that an error repeats
_TOKENS = re.compile(r'"(?:[^"\\]|\\.)*"|[{}\[\],:]|\n|[^\s{}\[\],:"]+', re.DOTALL)


@dataclass(frozen=True)
class Document:
    """A parsed file whose top is a mapping. `warnings` are about its form."""

    path: Path
    data: Mapping[str, Any]
    find_lines: Callable[[], Mapping[KeyPath, int]] = field(repr=False, compare=False)
    warnings: tuple[str, ...] = ()

    @cached_property
    def _lines(self) -> Mapping[KeyPath, int]:
        return self.find_lines()

    def where(self, *keys: str | int) -> str:
        """ "`genai_config.json` line 7", the line of the key (or of the nearest parent that is there)."""
        for stop in range(len(keys), 0, -1):
            if keys[:stop] in self._lines:
                return f"`{self.path.name}` line {self._lines[keys[:stop]]}"
        return f"`{self.path.name}`"

    def get(self, *keys: str | int) -> Any:
        """The value at a path; None when a part of the path is missing or null."""
        value: Any = self.data
        for depth, key in enumerate(keys):
            if value is None:
                return None
            if isinstance(key, str):
                if not isinstance(value, Mapping):
                    self.fail(keys[:depth], "an object")
                value = value.get(key)
            else:
                value = value[key]
        return value

    def fail(self, keys: KeyPath, wanted: str) -> NoReturn:
        """Raise: the value at `keys` is not what was wanted."""
        name = ".".join(map(str, keys)) or "the whole file"
        raise GenaiError(
            f"{self.where(*keys)}: `{name}` is {describe(self._peek(keys))}; wanted {wanted}",
            hint=f"correct `{self.path.name}`, or export the model again",
        )

    def _peek(self, keys: KeyPath) -> Any:
        value: Any = self.data
        for key in keys:
            if isinstance(value, Mapping) and key not in value:
                return MISSING
            value = value[key]
        return value

    def mapping(self, *keys: str | int) -> Mapping[str, Any]:
        """An object; empty when missing."""
        value = self.get(*keys)
        if value is None:
            return {}
        if not isinstance(value, Mapping):
            self.fail(keys, "an object")
        return value

    def text(self, *keys: str | int) -> str | None:
        """A string."""
        value = self.get(*keys)
        if value is not None and not isinstance(value, str):
            self.fail(keys, "a string")
        return value

    def whole(self, *keys: str | int, at_least: int = 0) -> int | None:
        """A whole number; `1.0` counts, `true` does not."""
        value = self.get(*keys)
        if value is None:
            return None
        if isinstance(value, float) and value.is_integer():
            value = int(value)
        if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
            self.fail(keys, f"a whole number >= {at_least}")
        return value

    def number(self, *keys: str | int) -> float | None:
        """A finite number."""
        value = self.get(*keys)
        if value is None:
            return None
        if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
            self.fail(keys, "a number")
        return float(value)

    def flag(self, *keys: str | int) -> bool | None:
        """true or false."""
        value = self.get(*keys)
        if value is not None and not isinstance(value, bool):
            self.fail(keys, "true or false")
        return value

    def ids(self, *keys: str | int) -> tuple[int, ...]:
        """One token id or a list of them; empty only when the key is missing or null."""
        value = self.get(*keys)
        if value is None:
            return ()
        items = value if isinstance(value, list) else [value]
        if not items or not all(isinstance(item, int) and not isinstance(item, bool) and item >= 0 for item in items):
            self.fail(keys, "a token id (a whole number >= 0) or a list of at least one")
        return tuple(items)


def describe(value: Any) -> str:
    """A JSON value for an error message, cut short."""
    if value is MISSING:
        return "missing"
    if isinstance(value, Mapping):
        return "an object"
    if isinstance(value, list) and not value:
        return "an empty list"
    text = json.dumps(value, ensure_ascii=False, default=str)
    return f"`{text if len(text) <= _SHOWN else text[:_SHOWN] + '…'}`"


def read_text(path: Path) -> str:
    """UTF-8 text; GenaiError when missing, too large, not UTF-8, or a Git-LFS pointer."""
    try:
        size = path.stat().st_size
        raw = path.read_bytes() if size <= MAX_BYTES else b""
    except OSError as error:
        raise GenaiError(f"cannot read `{path}`: {error.strerror}") from None
    if size > MAX_BYTES:
        raise GenaiError(f"`{path}` has {size} bytes; wanted a text file of at most {MAX_BYTES}")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise GenaiError(
            f"`{path.name}` line {line}: byte 0x{raw[error.start]:02x} at offset {error.start} is not UTF-8",
            hint=f"wanted UTF-8: save `{path}` again as such",
        ) from None
    if text.startswith(LFS_MAGIC):
        raise GenaiError(f"`{path}` is a Git-LFS pointer ({size} bytes), not the file", hint="run `git lfs pull` there")
    return text


def read_json(path: Path) -> Document:
    """A JSON object. A byte-order mark is skipped with a warning; everything else that is not JSON is an error."""
    text = read_text(path)
    warnings = (
        (f"`{path.name}` starts with a byte-order mark, which JSON has not",) if text.startswith("\ufeff") else ()
    )
    text = text.removeprefix("\ufeff")
    try:
        data = json.loads(text)
    except RecursionError:
        raise GenaiError(f"`{path.name}`: brackets are nested too deep; wanted a JSON object") from None
    except json.JSONDecodeError as error:
        raise GenaiError(
            f"`{path.name}` line {error.lineno} column {error.colno}: {_complaint(error)}",
            hint=f"correct `{path}`",
        ) from None
    if not isinstance(data, dict):
        raise GenaiError(f"`{path.name}` line 1: the file holds {_kind(data)}; wanted a JSON object")
    return Document(path, data, lambda: json_lines(text), warnings)


def _complaint(error: json.JSONDecodeError) -> str:
    """The decoder's message, and for a trailing comma what it is."""
    before, after = error.doc[: error.pos].rstrip(), error.doc[error.pos :].lstrip(" \t\r\n,")
    if after[:1] in ("}", "]") and (before.endswith(",") or error.doc[error.pos : error.pos + 1] == ","):
        return f"a comma before `{after[0]}`; wanted none after the last entry"
    return f"not JSON: {error.msg[0].lower()}{error.msg[1:]}"


def _kind(data: Any) -> str:
    return {list: "a list", str: "a string", bool: "true or false", type(None): "null"}.get(type(data), "a number")


def json_lines(text: str) -> dict[KeyPath, int]:
    """Line (from 1) of every key and list item of a JSON text that parses."""
    lines: dict[KeyPath, int] = {}
    path: list[str | int] = []  # the key or index being filled, one for each open bracket
    line, last = 1, ""
    for match in _TOKENS.finditer(text):
        token = match[0]
        if token == "[":
            path.append(0)
        elif token == "{":
            path.append("")
        elif token in "}]":
            path.pop()
        elif token == "," and path and isinstance(path[-1], int):
            path[-1] += 1
        elif token == ":" and path:
            path[-1] = json.loads(last)
            lines[tuple(path)] = line
        if token not in ("\n", ",", ":", "}", "]") and path and isinstance(path[-1], int) and token != "[":
            lines.setdefault(tuple(path), line)
        line += token.count("\n")
        last = token if token != "\n" else last
    return lines


def read_yaml(path: Path) -> Document:
    """A YAML mapping (no tags that build objects)."""
    import yaml

    text = read_text(path)
    if len(text) > MAX_YAML:
        raise GenaiError(f"`{path}` has {len(text)} characters; wanted at most {MAX_YAML}")
    try:
        tree = yaml.compose(text, Loader=yaml.SafeLoader)
        data = yaml.safe_load(text)
    except RecursionError:
        raise GenaiError(f"`{path.name}`: nested too deep; wanted a YAML mapping") from None
    except yaml.YAMLError as error:
        mark = getattr(error, "problem_mark", None)
        line = f" line {mark.line + 1}" if mark else ""
        problem = getattr(error, "problem", None) or "cannot be parsed"
        raise GenaiError(f"`{path.name}`{line}: not YAML: {problem}", hint=f"correct `{path}`") from None
    if not isinstance(data, dict):
        raise GenaiError(f"`{path.name}` line 1: the file holds {_kind(data)}; wanted a YAML mapping")
    return Document(path, data, lambda: _yaml_lines(tree, ()))


MAX_YAML = 1 << 20  # characters; metadata has a few thousand, and YAML aliases can expand without bound


def _yaml_lines(node: Any, path: KeyPath) -> dict[KeyPath, int]:
    lines: dict[KeyPath, int] = {}
    if node.id == "mapping":
        for key, value in node.value:
            inner = (*path, str(key.value))
            lines |= {inner: key.start_mark.line + 1} | _yaml_lines(value, inner)
    elif node.id == "sequence":
        for index, value in enumerate(node.value):
            inner = (*path, index)
            lines |= {inner: value.start_mark.line + 1} | _yaml_lines(value, inner)
    return lines
