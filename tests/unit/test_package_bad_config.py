"""Malformed declarations: one error that names file, line, key, what was found and what was wanted; exit 2."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from genai_cli.errors import ExitCode, GenaiError
from genai_cli.package.document import json_lines, read_json
from genai_cli.package.model import ModelPackage
from genai_cli.package.open import open_package

MISSING = object()


def config(**model: Any) -> dict[str, Any]:
    """A sound genai_config.json with some keys of `model` replaced (or left out)."""
    sound = {"type": "llama", "vocab_size": 512, "context_length": 64, "bos_token_id": 1, "eos_token_id": 2,
             "pad_token_id": 0, "decoder": {"filename": "model.onnx"}}  # fmt: skip
    return {"model": {key: value for key, value in (sound | model).items() if value is not MISSING}}


def opened(folder: Path, content: str | bytes | dict[str, Any]) -> ModelPackage:
    """Open a folder with this genai_config.json; the model itself is not read."""
    raw = json.dumps(content, indent=1) if isinstance(content, dict) else content
    (folder / "genai_config.json").write_bytes(raw if isinstance(raw, bytes) else raw.encode())
    (folder / "model.onnx").touch()
    return open_package(folder)


def refused(folder: Path, content: str | bytes | dict[str, Any]) -> str:
    with pytest.raises(GenaiError) as caught:
        opened(folder, content)
    assert caught.value.exit_code == ExitCode.CANNOT
    return caught.value.message


@pytest.mark.parametrize(
    ("eos", "ids"), [(2, (2,)), ([2, 7], (2, 7)), ([7, 2, 7], (2, 7)), (MISSING, ()), (None, ()), (0, (0,))]
)
def test_eos_as_it_may_be(tmp_path: Path, eos: Any, ids: tuple[int, ...]) -> None:
    package = opened(tmp_path, config(eos_token_id=eos))
    assert package.eos_token_ids == ids
    assert any("end-of-sequence" in warning for warning in package.warnings) == (not ids)


@pytest.mark.parametrize(
    ("eos", "shown"),
    [
        ([], "an empty list"),
        ("</s>", '`"</s>"`'),
        (-4, "`-4`"),
        (True, "`true`"),
        (2.5, "`2.5`"),
        ([2, "x"], '`[2, "x"]`'),
        ({"a": 1}, "an object"),
    ],
)
def test_eos_as_it_may_not_be(tmp_path: Path, eos: Any, shown: str) -> None:
    message = refused(tmp_path, config(eos_token_id=eos))
    assert message.startswith(f"`genai_config.json` line 7: `model.eos_token_id` is {shown}; wanted a token id")


@pytest.mark.parametrize(("pad", "found"), [(0, 0), (-1, None), ([3, 4], 3), (MISSING, None)])
def test_pad(tmp_path: Path, pad: Any, found: int | None) -> None:
    assert opened(tmp_path, config(pad_token_id=pad)).pad_token_id == found


def test_pad_as_text_is_refused(tmp_path: Path) -> None:
    assert '`model.pad_token_id` is `"<pad>"`' in refused(tmp_path, config(pad_token_id="<pad>"))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"context_length": 0}, "line 5: `model.context_length` is `0`; wanted a whole number >= 1"),
        ({"context_length": "many"}, '`model.context_length` is `"many"`'),
        ({"context_length": True}, "`model.context_length` is `true`"),
        ({"context_length": 12.5}, "`model.context_length` is `12.5`"),
        ({"type": 3}, "`model.type` is `3`; wanted a string"),
        ({"decoder": MISSING}, "`model` has no `decoder`"),
        ({"decoder": "model.onnx"}, "`model.decoder` is `\"model.onnx\"`; wanted an object"),
        ({"decoder": {}}, "`model.decoder` has no `filename`"),
        ({"decoder": {"filename": 3}}, "`model.decoder.filename` is `3`; wanted a string"),
        ({"decoder": {"filename": "gone.onnx"}}, "the file `gone.onnx` does not exist"),
        ({"decoder": {"filename": "../model.onnx"}}, "wanted a relative path inside the model's folder"),
        ({"decoder": {"filename": "/etc/passwd"}}, "wanted a relative path inside the model's folder"),
        ({"decoder": {"filename": "c:\\model.onnx"}}, "wanted a relative path inside the model's folder"),
        ({"decoder": {"filename": "a\\..\\..\\m.onnx"}}, "wanted a relative path inside the model's folder"),
        ({"decoder": {"filename": "model.onnx", "inputs": {"input_ids": 3}}}, "decoder.inputs.input_ids` is `3`"),
        ({"decoder": {"filename": "model.onnx", "sliding_window": {"window_size": -1}}}, "window_size` is `-1`"),
    ],
)  # fmt: skip
def test_wrong_values_name_their_key(tmp_path: Path, changes: dict[str, Any], message: str) -> None:
    assert message in refused(tmp_path, config(**changes))


@pytest.mark.parametrize(
    ("search", "message"),
    [
        ({"top_k": "50"}, "`search.top_k` is `\"50\"`; wanted a whole number >= 0"),
        ({"temperature": []}, "`search.temperature` is an empty list; wanted a number"),
        ({"do_sample": 1}, "`search.do_sample` is `1`; wanted true or false"),
        ([1], "`search` is `[1]`; wanted an object"),
    ],
)  # fmt: skip
def test_wrong_search_values(tmp_path: Path, search: Any, message: str) -> None:
    assert message in refused(tmp_path, config() | {"search": search})


def test_unknown_keys_warn_with_their_line(tmp_path: Path) -> None:
    content = config(flux_capacitor=1) | {"search": {"top_q": 1}}
    package = opened(tmp_path, content)
    assert package.warnings[:2] == (
        "`genai_config.json` line 12: unknown key `model.flux_capacitor`, ignored",
        "`genai_config.json` line 15: unknown key `search.top_q`, ignored",
    )


@pytest.mark.parametrize(
    ("raw", "message"),
    [
        ('{"model": {\n "type": "x",\n}}', "line 3 column 1: a comma before `}`"),
        ('{"model": [1,\n 2,]}', "a comma before `]`"),
        ('{"model": \n', "line 2 column 1: not JSON"),
        ("", "line 1 column 1: not JSON"),
        ("[]", "line 1: the file holds a list; wanted a JSON object"),
        ("[" * 10_000_000, "brackets are nested too deep"),
        ('{"a":' * 100_000, "brackets are nested too deep"),
        (b'{"model": \n"\xff"}', "line 2: byte 0xff at offset 12 is not UTF-8"),
        ('{"model": 1}'.encode("utf-16"), "byte 0xff at offset 0 is not UTF-8"),
        ("version https://git-lfs.github.com/spec/v1\noid sha256:0\n", "is a Git-LFS pointer"),
        ('{"model": 3}', "`model` is `3`; wanted an object"),
    ],
)
def test_files_that_are_no_json_object(tmp_path: Path, raw: str | bytes, message: str) -> None:
    assert message in refused(tmp_path, raw)


def test_a_byte_order_mark_is_skipped_with_a_warning(tmp_path: Path) -> None:
    package = opened(tmp_path, b"\xef\xbb\xbf" + json.dumps(config()).encode())
    assert package.eos_token_ids == (2,)
    assert "byte-order mark" in package.warnings[0]


def test_errors_do_not_repeat_what_other_files_hold(tmp_path: Path) -> None:
    secret = tmp_path / "secret"
    secret.write_text("root:hunter2\n")
    folder = tmp_path / "m"
    folder.mkdir()
    (folder / "genai_config.json").symlink_to(secret)
    (folder / "model.onnx").touch()
    with pytest.raises(GenaiError) as caught:
        open_package(folder)
    assert "hunter2" not in caught.value.message
    assert "root" not in caught.value.message


def test_a_long_wrong_value_is_cut(tmp_path: Path) -> None:
    message = refused(tmp_path, config(eos_token_id="x" * 10_000))
    assert len(message) < 200


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("model: [", "`inference_metadata.yaml` line 1: not YAML"),
        ("- a\n", "the file holds a list; wanted a YAML mapping"),
        ("model:\n  max_sequence_length: many\n", 'line 2: `model.max_sequence_length` is `"many"`'),
        ("model: !!python/object/apply:os.system [true]\n", "not YAML"),
        ("[" * 100_000, "nested too deep"),
        ("model:\n  io:\n    kv_inputs: [a, b]\n    kv_outputs: [c]\n", "`model.io.kv_outputs` is"),
        ("model:\n  io:\n    kv_inputs: [a]\n", "line 2: `model.io.kv_outputs` is missing; wanted 1 names"),
        ("model:\n  io:\n    state_pairs:\n    - input: a\n", "wanted a mapping with `input` and `output`"),
    ],
)
def test_bad_metadata(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "inference_metadata.yaml").write_text(text)
    (tmp_path / "model.onnx").touch()
    with pytest.raises(GenaiError) as caught:
        open_package(tmp_path)
    assert message in caught.value.message


def test_a_broken_file_beside_the_config_is_named(tmp_path: Path) -> None:
    (tmp_path / "generation_config.json").write_text('{"eos_token_id": "nine"}')
    assert "`generation_config.json` line 1: `eos_token_id`" in refused(tmp_path, config())


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=12,
)


@given(st.dictionaries(st.text(max_size=5), JSON, max_size=4), st.sampled_from([None, 1]))
def test_lines_of_keys(document: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(document, indent=indent)
    rows = text.split("\n")
    for path, line in json_lines(text).items():
        if isinstance(path[-1], str):
            assert json.dumps(path[-1]) + ":" in rows[line - 1]
    assert {path for path in json_lines(text) if len(path) == 1} == {(key,) for key in document}


def test_read_json_keeps_data(tmp_path: Path) -> None:
    (tmp_path / "a.json").write_text('{"a": {"b": [1, 2]}}')
    document = read_json(tmp_path / "a.json")
    assert document.get("a", "b", 1) == 2
    assert document.get("a", "c", "d") is None
    assert document.where("a", "b", 1) == "`a.json` line 1"
