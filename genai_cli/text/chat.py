"""Chat templates: Jinja2 in a sandbox, with the helpers and whitespace rules of Hugging Face's."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from typing import Any, NoReturn

from jinja2 import TemplateError, TemplateSyntaxError, nodes
from jinja2.ext import Extension, loopcontrols
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from genai_cli.errors import GenaiError

Message = Mapping[str, Any]
# What a template's own expressions can raise beside Jinja's errors.
_FAULTS = (TemplateError, ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


class _Generation(Extension):
    """`{% generation %}`: marks the assistant's text for training; here only its body counts."""

    tags = {"generation"}  # noqa: RUF012 - the base class declares it so

    def parse(self, parser: Parser) -> nodes.Node | list[nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class ChatTemplate:
    """One template and the special tokens it may name (`bos_token` and so on)."""

    def __init__(self, source: str, special_tokens: Mapping[str, str] | None = None) -> None:
        """GenaiError with the line when the template does not parse."""
        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=[loopcontrols, _Generation]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        self._environment = environment
        self._special = dict(special_tokens or {})
        try:
            self._template = environment.from_string(source)
        except TemplateSyntaxError as error:
            raise GenaiError(
                f"the chat template, line {error.lineno}: {error.message}",
                hint="correct chat_template.jinja, or pass --raw",
            ) from None

    def render(
        self,
        messages: Sequence[Message],
        *,
        add_generation_prompt: bool = True,
        now: Callable[[], datetime] = datetime.now,
        **variables: Any,
    ) -> str:
        """The prompt text. `variables` are what templates ask for beside messages (`tools`, `enable_thinking`, ...).

        GenaiError when the template refuses the messages (`raise_exception`) or fails.
        """
        try:
            return self._template.render(
                {**self._special, "tools": None, "documents": None, **variables},
                messages=list(messages),
                add_generation_prompt=add_generation_prompt,
                strftime_now=lambda form: now().strftime(form),
            )
        except _FAULTS as error:
            raise GenaiError(
                f"the chat template refuses these messages: {str(error) or type(error).__name__}",
                hint="change the messages, or pass --raw",
            ) from None


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Jinja's own `tojson` escapes for HTML; a prompt is not HTML."""
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise(message: str) -> NoReturn:
    raise TemplateError(message)
