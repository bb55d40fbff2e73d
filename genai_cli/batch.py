"""Offline batches: JSON Lines in, JSON Lines out, resumable."""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

from genai_cli.errors import GenaiError
from genai_cli.generate import Limits
from genai_cli.model import Ask, Model, document, sampling_of

_SAMPLING = (
    "temperature", "top_k", "top_p", "min_p", "repetition_penalty", "no_repeat_ngram", "min_new_tokens", "seed",
)  # fmt: skip
_LIMITS = ("max_new_tokens", "max_length", "ignore_eos")
_KNOWN = {"id", "prompt", "messages", "prompt_ids", "system", "raw", "stop", "greedy", "logprobs", *_SAMPLING, *_LIMITS}


@dataclass(frozen=True)
class Line:
    """One request: its number in the file (from 1), its id, and the request itself or what is wrong with it."""

    number: int
    id: str
    fields: dict[str, Any]
    error: str = ""


@dataclass
class BatchResult:
    """How a batch went."""

    done: int = 0
    skipped: int = 0  # already in the output (--resume)
    errors: list[str] = field(default_factory=list)
    new_tokens: int = 0
    seconds: float = 0.0


def read_lines(path: Path) -> list[Line]:
    """Lines end at LF only (U+2028 is text); a BOM, CRLF and blank lines are fine. GenaiError when unreadable."""
    try:
        raw = path.read_bytes()
    except OSError as error:
        raise GenaiError(f"cannot read the prompts `{path}`: {error.strerror}") from None
    lines = []
    for number, line in enumerate(raw.removeprefix(b"\xef\xbb\xbf").split(b"\n"), 1):
        if line.strip():
            lines.append(_line(number, line.strip()))
    return lines


def _line(number: int, raw: bytes) -> Line:
    try:
        fields = json.loads(raw.decode("utf-8"))
    except UnicodeDecodeError:
        return Line(number, str(number), {}, "not UTF-8")
    except json.JSONDecodeError as error:
        return Line(number, str(number), {}, f"not JSON: {error.msg} at column {error.colno}")
    except RecursionError:
        return Line(number, str(number), {}, "nested too deeply")
    if not isinstance(fields, dict):
        return Line(number, str(number), {}, f"a {type(fields).__name__}, wanted an object")
    return Line(number, str(fields.get("id", number)), fields, _mistake(fields))


_WHOLE = ("max_new_tokens", "max_length", "min_new_tokens", "top_k", "no_repeat_ngram", "seed", "logprobs")
_REAL = ("temperature", "top_p", "min_p", "repetition_penalty")
_FLAGS = ("raw", "greedy", "ignore_eos")


def _option_mistake(fields: dict[str, Any]) -> str:
    """Options of a wrong type or sign: JSON's true is no number, and "5" neither."""
    for name, value in fields.items():
        if name in _WHOLE and (type(value) is not int or value < 0):
            return f"`{name}` is {value!r}; wanted a whole number of at least 0"
        if name in _REAL and type(value) not in (int, float):
            return f"`{name}` is {value!r}; wanted a number"
        if name in _FLAGS and not isinstance(value, bool):
            return f"`{name}` is {value!r}; wanted true or false"
    stops = _list(fields.get("stop", []))
    return "" if all(isinstance(stop, str) for stop in stops) else "`stop` is no text, and no list of texts"


def _mistake(fields: dict[str, Any]) -> str:
    unknown = sorted(set(fields) - _KNOWN)
    if unknown:
        return f"unknown keys {', '.join(f'`{key}`' for key in unknown)}"
    forms = [key for key in ("prompt", "messages", "prompt_ids") if key in fields]
    if len(forms) != 1:
        return f"wanted one of `prompt`, `messages`, `prompt_ids`, found {forms or 'none'}"
    form, value = forms[0], fields[forms[0]]
    fits = {
        "prompt": isinstance(value, str),
        "messages": isinstance(value, list)
        and all(isinstance(m, dict) and {"role", "content"} <= set(m) for m in value),
        "prompt_ids": isinstance(value, list) and all(type(token) is int for token in value),
    }[form]
    if not fits:
        return f"`{form}` has the wrong type"
    if wrong := _option_mistake(fields):
        return wrong
    text = json.dumps(value, ensure_ascii=False)
    return "a lone surrogate, which no text can hold" if any(0xD800 <= ord(c) <= 0xDFFF for c in text) else ""


def ask_of(line: Line, base: Ask, model: Model, given: dict[str, Any], greedy: bool) -> Ask:
    """A line's request on top of the command line's options."""
    fields = line.fields
    flags = given | {name: fields[name] for name in _SAMPLING if name in fields}
    limits = replace(base.limits, **{name: fields[name] for name in _LIMITS if name in fields})
    if "max_length" in fields and "max_new_tokens" not in fields:
        limits = replace(limits, max_new_tokens=None)
    ids = fields.get("prompt_ids")
    try:
        return replace(
            base,
            prompt=fields.get("prompt"),
            messages=tuple(fields.get("messages", ())),
            prompt_ids=None if ids is None else tuple(ids),
            system=fields.get("system", base.system),
            raw=bool(fields.get("raw", base.raw)),
            stops=tuple(_list(fields.get("stop", list(base.stops)))),
            num_logprobs=int(fields.get("logprobs", base.num_logprobs)),
            options=sampling_of(model.package, flags, greedy=bool(fields.get("greedy", greedy))),
            limits=Limits(limits.max_new_tokens, limits.max_length, bool(limits.ignore_eos)),
        )
    except (TypeError, ValueError) as error:
        raise GenaiError(f"an option has the wrong type: {error}") from None


def _list(value: Any) -> list[Any]:
    return list(value) if isinstance(value, list) else [value]


def finished(path: Path) -> tuple[set[str], int]:
    """Ids in a partial file, and the bytes of its whole lines: one torn last line is dropped."""
    if not path.exists():
        return set(), 0
    raw = path.read_bytes()
    whole = raw.rfind(b"\n") + 1
    ids: set[str] = set()
    for number, line in enumerate(raw[:whole].splitlines(), 1):
        try:
            ids.add(str(json.loads(line)["id"]))
        except (ValueError, KeyError, TypeError):
            raise GenaiError(
                f"`{path}`, line {number} is not a result of this command", hint="remove it, or run without --resume"
            ) from None
    return ids, whole


def run_batch(
    model: Model, lines: list[Line], make: Callable[[Line], Ask], write: Callable[[str], None],
    tick: Callable[[], None], done: set[str], max_rows: int = 1,
) -> BatchResult:  # fmt: skip
    """Answer every line that is not done, up to `max_rows` in one step, and write each when it is finished; a bad one
    becomes an error record, the others run."""
    result = BatchResult()
    todo = [line for line in lines if line.id not in done]
    result.skipped = len(lines) - len(todo)
    for _ in range(result.skipped):
        tick()
    started = time.perf_counter()
    for number, answer in model.ask_all((partial(_checked, line, make) for line in todo), max_rows):
        line = todo[number]
        if isinstance(answer, GenaiError):
            result.errors.append(f"line {line.number}: {answer.message}")
            write(_text({"id": line.id, "line": line.number, "error": answer.message}))
        else:
            result.new_tokens += len(answer.generated.token_ids)
            write(_text({"id": line.id, "line": line.number, **document(model, answer)}))
        result.done += 1
        tick()
    result.seconds = time.perf_counter() - started
    return result


def _checked(line: Line, make: Callable[[Line], Ask]) -> Ask:
    if line.error:
        raise GenaiError(line.error)
    return make(line)


def _text(record: dict[str, Any]) -> str:
    return json.dumps(record, ensure_ascii=False) + "\n"


class PartialFile:
    """Results in `OUT.partial`, one flushed line each; becomes OUT when the batch is through."""

    def __init__(self, out: Path, *, resume: bool) -> None:
        """GenaiError when OUT exists already, or a partial file is there and `resume` is off."""
        self.out, self.partial = out, out.with_name(out.name + ".partial")
        if out.exists() and not resume:
            raise GenaiError(f"`{out}` exists already", hint="remove it, choose another --out, or add --resume")
        if resume and out.exists() and not self.partial.exists():
            os.replace(out, self.partial)
        if self.partial.exists() and not resume:
            raise GenaiError(f"`{self.partial}` is left from an interrupted run", hint="add --resume, or remove it")
        self.done, whole = finished(self.partial) if resume else (set(), 0)
        try:
            self._file = self.partial.open("r+b" if self.partial.exists() else "wb")
        except OSError as error:
            raise GenaiError(f"cannot write `{self.partial}`: {error.strerror}") from None
        self._file.truncate(whole)
        self._file.seek(whole)

    def write(self, line: str) -> None:
        """One record, on disk before the next begins."""
        try:
            self._file.write(line.encode("utf-8"))
            self._file.flush()
        except OSError as error:
            raise GenaiError(
                f"cannot write `{self.partial}`: {error.strerror}; finished records are kept",
                hint="make room, add --resume",
            ) from None

    def finish(self) -> None:
        """The whole batch is there."""
        self._file.flush()
        os.fsync(self._file.fileno())
        self._file.close()
        os.replace(self.partial, self.out)

    def close(self) -> None:
        """Leave the partial file for --resume."""
        self._file.close()
