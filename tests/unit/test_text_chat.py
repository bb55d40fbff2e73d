"""Chat templates behave as Hugging Face's do, and refuse in words."""

from __future__ import annotations

from datetime import datetime
from pathlib import Path

import pytest

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.text.chat import ChatTemplate

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
USER = [{"role": "user", "content": "hi <b>"}]


def test_a_real_template() -> None:
    source = (PACKAGES / "llama-fp32-cpu" / "chat_template.jinja").read_text()
    assert ChatTemplate(source).render(USER) == "<|im_start|>user\nhi <b><|im_end|>\n<|im_start|>assistant\n"
    assert ChatTemplate(source).render(USER, add_generation_prompt=False).endswith("<|im_end|>\n")


@pytest.mark.parametrize(
    ("source", "text"),
    [
        ("{% if true %}\n  a\n{% endif %}\nb", "  a\nb"),  # trim_blocks
        ("   {% if true %}x{% endif %}", "x"),  # lstrip_blocks
        ("{{ bos_token }}{{ messages[0].content }}", "<s>hi <b>"),
        ("{{ {'b': '<é>', 'a': 1} | tojson }}", '{"b": "<é>", "a": 1}'),
        ("{{ [1] | tojson(indent=2) }}", "[\n  1\n]"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% continue %}{% endif %}{{ i }}{% endfor %}", "02"),
        ("{% for i in [0, 1, 2] %}{% if i == 1 %}{% break %}{% endif %}{{ i }}{% endfor %}", "0"),
        ("{{ strftime_now('%d %b %Y') }}", "01 Dec 2026"),
        ("{% generation %}x{% endgeneration %}", "x"),
        ("{% if tools is none %}no tools{% endif %}", "no tools"),
        ("{{ undefined_name }}|{{ flavour }}", "|sweet"),
    ],
)  # fmt: skip
def test_helpers_and_whitespace(source: str, text: str) -> None:
    template = ChatTemplate(source, {"bos_token": "<s>"})
    assert template.render(USER, now=lambda: datetime(2026, 12, 1), flavour="sweet") == text


@pytest.mark.parametrize(
    ("source", "message"),
    [
        ("{{ raise_exception('roles must alternate') }}", "roles must alternate"),
        ("{{ messages[0].content.missing.x }}", "missing"),
        ("{{ 1 / 0 }}", "division by zero"),
        ("{{ messages.append(1) }}", "not safely callable|has no attribute|unsafe"),
        ("{{ ''.__class__.__mro__ }}", "unsafe"),
        ("{% for i in range(10 ** 9) %}{% endfor %}", "too big"),
    ],
)
def test_refusals_are_one_error(source: str, message: str) -> None:
    with pytest.raises(GenaiError, match=message) as caught:
        ChatTemplate(source).render(USER)
    assert caught.value.exit_code == ExitCode.CANNOT


def test_a_template_that_does_not_parse_names_its_line() -> None:
    with pytest.raises(GenaiError, match="the chat template, line 2"):
        ChatTemplate("a\n{% if %}")
