"""A package's tokenizer and chat template, opened."""

from __future__ import annotations

from genai_cli.errors import GenaiError
from genai_cli.package.model import ModelPackage
from genai_cli.text.chat import ChatTemplate
from genai_cli.text.tokenizer import Tokenizer


def open_tokenizer(package: ModelPackage) -> Tokenizer:
    """GenaiError when the package has none."""
    if package.tokenizer is None:
        raise GenaiError(f"`{package.path}` has no tokenizer.json", hint="give token ids: --prompt-ids 1,2,3")
    return Tokenizer(package.tokenizer)


def open_chat_template(package: ModelPackage) -> ChatTemplate | None:
    """None when the package has no template: prompts are then taken as they are."""
    if package.chat_template is None:
        return None
    return ChatTemplate(package.chat_template, package.special_tokens)
