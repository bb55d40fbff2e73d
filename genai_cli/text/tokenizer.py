"""The Hugging Face tokenizer of a package: text -> ids, ids -> text, and text as it comes."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer as HuggingFaceTokenizer

from genai_cli.errors import GenaiError

REPLACEMENT = "\ufffd"
_BYTE_TOKEN = re.compile(r"<0x[0-9A-Fa-f]{2}>")
# Decoders whose output for a prefix of the ids stays a prefix of the output for all of them.
_STREAMABLE = {"ByteLevel", "Metaspace", "ByteFallback", "Fuse", "Strip", "Replace"}


class Tokenizer:
    """`tokenizer.json`, without the truncation and padding that files carry over from training."""

    def __init__(self, path: Path) -> None:
        """GenaiError when the file cannot be read or is not a tokenizer."""
        try:
            raw = Path(path).read_bytes()
        except OSError as error:
            raise GenaiError(f"cannot read `{path}`: {error.strerror}") from None
        try:
            self._tokenizer = HuggingFaceTokenizer.from_buffer(raw)
        except Exception as error:  # the library raises plain Exception for whatever is wrong inside
            reason = str(error).splitlines()[0][:120] if not raw.startswith(b"version https://git-lfs") else (
                "it is a Git-LFS pointer; run `git lfs pull`"
            )  # fmt: skip
            raise GenaiError(f"`{path}` is not a tokenizer: {reason}", hint="export the model again") from None
        self._tokenizer.no_truncation()
        self._tokenizer.no_padding()
        self.decoders = _decoder_types(self._tokenizer)
        added = self._tokenizer.get_added_tokens_decoder()
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)

    @property
    def vocab_size(self) -> int:
        """Number of ids, added tokens included."""
        return int(self._tokenizer.get_vocab_size(with_added_tokens=True))

    def encode(self, text: str, *, add_special_tokens: bool) -> list[int]:
        """Ids of `text`. `add_special_tokens`: put BOS and the like where tokenizer.json says (never after a chat
        template, which writes its own). Special tokens spelled out in the text become their ids either way.
        GenaiError on a lone surrogate, which no encoding can carry."""
        lone = next((index for index, char in enumerate(text) if "\ud800" <= char <= "\udfff"), None)
        if lone is not None:
            raise GenaiError(
                f"the text holds a lone surrogate U+{ord(text[lone]):04X} at character {lone}; wanted Unicode text",
                hint="check how the text was cut or escaped",
            )
        return list(self._tokenizer.encode(text, add_special_tokens=add_special_tokens).ids)

    def decode(self, ids: Iterable[int], *, skip_special_tokens: bool = True) -> str:
        """Text of ids. Bytes that form no character become U+FFFD; ids outside the vocabulary have no text."""
        return str(self._tokenizer.decode(list(ids), skip_special_tokens=skip_special_tokens))

    def token(self, token_id: int) -> str | None:
        """The token's spelling in the vocabulary; None outside it."""
        spelling = self._tokenizer.id_to_token(token_id)
        return None if spelling is None else str(spelling)

    def token_id(self, token: str) -> int | None:
        """The id of a spelling; None when it is no token."""
        found = self._tokenizer.token_to_id(token)
        return None if found is None else int(found)

    def is_byte(self, token_id: int) -> bool:
        """Whether the id is one raw byte of a byte-fallback vocabulary (`<0x0A>`)."""
        return bool(_BYTE_TOKEN.fullmatch(self.token(token_id) or ""))

    def stream(self, *, skip_special_tokens: bool = True) -> Detokenizer:
        """A detokenizer for one generation."""
        return Detokenizer(self, skip_special_tokens=skip_special_tokens)


def _decoder_types(tokenizer: HuggingFaceTokenizer) -> frozenset[str]:
    """Names of the decoders in tokenizer.json; empty when there is none."""
    if tokenizer.decoder is None:
        return frozenset()
    state = json.loads(tokenizer.decoder.__getstate__())
    parts = state.get("decoders", [state])
    return frozenset("Suffix" if part.get("stop") else part["type"] for part in parts)


class Detokenizer:
    """Text of one generation as its tokens come. What was returned is never taken back, a character is never halved,
    and all pieces with `finish()` join to exactly `Tokenizer.decode` of all ids: dangling bytes end as U+FFFD."""

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []  # the window: everything since the last clean cut
        self._sent = 0  # characters of the window's text that were returned
        self._bytes_join = tokenizer.decoders == {"ByteLevel"}
        self._streams = tokenizer.decoders <= _STREAMABLE

    def push(self, token_id: int) -> str:
        """The text that is now certain, which may be none."""
        if self._skip and (token_id in self._tokenizer.special_ids or self._tokenizer.token(token_id) is None):
            return ""
        self._ids.append(token_id)
        if not self._streams or self._tokenizer.is_byte(token_id):
            return ""  # a run of byte-fallback tokens is one text, or as a whole none
        text = self._text()
        certain = len(text) - 1 if self._bytes_join and text.endswith(REPLACEMENT) else len(text.rstrip(REPLACEMENT))
        if not self._bytes_join:
            return self._send(text, certain)
        piece = self._send(text, certain)
        if certain == len(text):  # bytes are complete here: decoding starts afresh
            self._ids, self._sent = [], 0
        return piece

    def finish(self) -> str:
        """The rest, dangling bytes as U+FFFD. The detokenizer is empty afterwards."""
        text = self._text()
        piece = self._send(text, len(text))
        self._ids, self._sent = [], 0
        return piece

    def _text(self) -> str:
        return self._tokenizer.decode(self._ids, skip_special_tokens=self._skip)

    def _send(self, text: str, stop: int) -> str:
        piece = text[self._sent : stop]
        self._sent = max(self._sent, stop)
        return piece
