"""Token ids, text as it comes, and stop sequences. TBYTE has one token for each of the 256 bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer as HuggingFaceTokenizer
from tokenizers import decoders, models, pre_tokenizers

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.text.stop import StopMatcher
from genai_cli.text.tokenizer import Tokenizer

PACKAGES = Path(__file__).parents[2] / "fixtures" / "packages"
BYTES = sorted(pre_tokenizers.ByteLevel.alphabet())  # 256 printable stand-ins


@pytest.fixture(scope="module")
def tbyte(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """256 byte tokens, no merges, and `<eos>` = 256."""
    tokenizer = HuggingFaceTokenizer(models.BPE({char: index for index, char in enumerate(BYTES)}, []))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<eos>"])
    return _saved(tokenizer, tmp_path_factory)


@pytest.fixture(scope="module")
def fallback(tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """SentencePiece's way: words with a leading `▁`, and `<0x..>` for bytes (ids 0..255)."""
    words = ["▁the", "▁cat", "s", "▁", "é"]
    vocab = {f"<0x{byte:02X}>": byte for byte in range(256)} | {word: 256 + i for i, word in enumerate(words)}
    tokenizer = HuggingFaceTokenizer(models.BPE(vocab, [], byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["</s>"])
    return _saved(tokenizer, tmp_path_factory)


def _saved(tokenizer: HuggingFaceTokenizer, folder: pytest.TempPathFactory) -> Tokenizer:
    path = folder.mktemp("tokenizer") / "tokenizer.json"
    tokenizer.save(str(path))
    return Tokenizer(path)


def pieces(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    stream = tokenizer.stream()
    return [*(stream.push(token) for token in ids), stream.finish()]


def byte_id(tokenizer: Tokenizer, value: int) -> int:
    """Id of a byte in TBYTE, through the text it decodes to."""
    return next(i for i in range(256) if tokenizer.decode([i]).encode() == bytes([value]))


def test_characters_of_several_tokens_are_never_halved(tbyte: Tokenizer) -> None:
    ids = tbyte.encode("é🙂", add_special_tokens=False)
    assert len(ids) == 6
    assert pieces(tbyte, ids) == ["", "é", "", "", "", "🙂", ""]


def test_a_limit_inside_a_character_flushes_one_replacement(tbyte: Tokenizer) -> None:
    ids = tbyte.encode("é🙂", add_special_tokens=False)[:4]  # ends after two of the emoji's four bytes
    assert pieces(tbyte, ids) == ["", "é", "", "", "\ufffd"]
    assert tbyte.decode(ids) == "é\ufffd"


def test_a_byte_that_starts_nothing_is_flushed_when_the_next_token_settles_it(tbyte: Tokenizer) -> None:
    lone = next(i for i in range(256) if BYTES[i] == "ÿ")  # byte 0xFF
    letter = byte_id(tbyte, ord("a"))
    assert pieces(tbyte, [lone]) == ["", "\ufffd"]
    assert pieces(tbyte, [lone, letter]) == ["", "\ufffda", ""]
    assert pieces(tbyte, [lone] * 3) == ["", "\ufffd", "\ufffd", "\ufffd"]


def test_special_tokens_have_no_text(tbyte: Tokenizer) -> None:
    letter = byte_id(tbyte, ord("a"))
    assert pieces(tbyte, [letter, 256, letter]) == ["a", "", "a", ""]
    assert tbyte.decode([letter, 256], skip_special_tokens=False) == "a<eos>"


@given(st.lists(st.integers(0, 260), max_size=40))
def test_stream_joins_to_the_decode_byte_level(tbyte: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(tbyte, ids)) == tbyte.decode(ids)


@given(st.text(max_size=30))
def test_text_survives_the_round_trip(tbyte: Tokenizer, text: str) -> None:
    ids = tbyte.encode(text, add_special_tokens=False)
    out = pieces(tbyte, ids)
    assert "".join(out) == tbyte.decode(ids)
    assert "<eos>" in text or "".join(out) == text
    assert "\ufffd" in text or not any("\ufffd" in piece for piece in out)


@given(st.lists(st.one_of(st.integers(0, 261), st.sampled_from([0x41, 0xC3, 0xA9, 0xFF, 256, 259])), max_size=30))
def test_stream_joins_to_the_decode_byte_fallback(fallback: Tokenizer, ids: list[int]) -> None:
    assert "".join(pieces(fallback, ids)) == fallback.decode(ids)


def test_byte_fallback_waits_for_the_end_of_a_run(fallback: Tokenizer) -> None:
    the, cat = 256, 257
    assert pieces(fallback, [the, cat]) == ["the", " cat", ""]
    assert pieces(fallback, [the, 0xC3, 0xA9, cat]) == ["the", "", "", "é cat", ""]
    assert pieces(fallback, [0x41, 261, 0xFF]) == ["", "", "", "\ufffd\ufffd"]  # a special token does not end it
    assert pieces(fallback, [the, 0x41, 0xFF]) == ["the", "", "", "\ufffd\ufffd"]  # one bad byte spoils the run


@given(st.lists(st.integers(0, 511), max_size=40))
def test_stream_joins_to_the_decode_on_a_real_tokenizer(ids: list[int]) -> None:
    tokenizer = REAL
    assert "".join(pieces(tokenizer, ids)) == tokenizer.decode(ids)


REAL = Tokenizer(PACKAGES / "llama-fp32-cpu" / "tokenizer.json")


@pytest.mark.parametrize(
    ("text", "ids"),
    [
        ("<|im_start|>\nhi", [3, 203, 76, 77]),
        ("<|im_start|> hi", [3, 393, 77]),
        ("<|im_start|>hi <s>", [3, 76, 77, 225, 1]),
        ("a\n\n\n\nb", [69, 315, 203, 203, 70]),  # GPT-2 leaves the last blank to the next word
        ("", []),
    ],
)
def test_ids_around_special_tokens_and_blank_lines(text: str, ids: list[int]) -> None:
    """Ids, not text: a space or newline lost beside a special token still decodes to nearly the same."""
    assert REAL.encode(text, add_special_tokens=False) == ids


def test_special_tokens_are_added_only_when_asked(tmp_path: Path) -> None:
    document = json.loads((PACKAGES / "llama-fp32-cpu" / "tokenizer.json").read_text())
    document["post_processor"]["single"].insert(0, {"SpecialToken": {"id": "<s>", "type_id": 0}})
    document["post_processor"]["special_tokens"] = {"<s>": {"id": "<s>", "ids": [1], "tokens": ["<s>"]}}
    document["truncation"] = {"direction": "Right", "max_length": 2, "strategy": "LongestFirst", "stride": 0}
    (tmp_path / "tokenizer.json").write_text(json.dumps(document))
    tokenizer = Tokenizer(tmp_path / "tokenizer.json")
    plain = tokenizer.encode("hi there", add_special_tokens=False)
    assert len(plain) > 2  # the file's truncation is a leftover of training
    assert tokenizer.encode("hi there", add_special_tokens=True) == [1, *plain]


def test_lone_surrogate_is_refused() -> None:
    with pytest.raises(GenaiError, match=r"lone surrogate U\+D83D at character 1") as caught:
        REAL.encode("a\ud83d", add_special_tokens=False)
    assert caught.value.exit_code == ExitCode.CANNOT


@pytest.mark.parametrize(
    "content", [b"", b"{", b'{"model": 1}', b"version https://git-lfs.github.com/spec/v1\n", b"\xff"]
)
def test_broken_tokenizer_files(tmp_path: Path, content: bytes) -> None:
    (tmp_path / "tokenizer.json").write_bytes(content)
    with pytest.raises(GenaiError, match="is not a tokenizer"):
        Tokenizer(tmp_path / "tokenizer.json")


STOPS = st.lists(st.text("ab\n", min_size=1, max_size=4), min_size=1, max_size=3)


@given(st.lists(st.text("ab\n", max_size=4), max_size=12), STOPS)
def test_stops_do_not_depend_on_where_tokens_end(parts: list[str], stops: list[str]) -> None:
    cut, whole = StopMatcher(stops), StopMatcher(stops)
    got = "".join(cut.push(part) for part in parts) + cut.finish()
    text = "".join(parts)
    assert got == whole.push(text) + whole.finish()
    assert cut.matched == whole.matched
    assert (cut.matched is not None) == any(stop in text for stop in stops)
    assert not any(stop in got for stop in stops)
    assert text.startswith(got + (cut.matched or ""))


def test_stop_across_tokens_is_not_printed() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push(part) for part in ["Paris.", "\n", "Us", "er", ": hi", "more"]] == [
        "Paris.",
        "",
        "",
        "",
        "",
        "",
    ]
    assert matcher.matched == "\nUser:"


def test_of_stops_that_end_together_the_longest_counts() -> None:
    matcher = StopMatcher(["b", "ab"])
    assert (matcher.push("xab"), matcher.matched) == ("x", "ab")


def test_what_only_looked_like_a_stop_is_printed() -> None:
    matcher = StopMatcher(["\nUser:"])
    assert [matcher.push("a\nUse"), matcher.push("d"), matcher.push("\nU"), matcher.finish()] == [
        "a",
        "\nUsed",
        "",
        "\nU",
    ]


def test_empty_stop_is_refused() -> None:
    with pytest.raises(GenaiError, match="empty stop"):
        StopMatcher([""])
