"""open_package: which of the four kinds of package a path is, and all that is said about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from genai_cli.errors import GenaiError
from genai_cli.package import genai_config, hugging_face, metadata
from genai_cli.package.document import Document, read_json, read_text, read_yaml
from genai_cli.package.model import ModelPackage

_SPECIAL = ("bos_token", "eos_token", "unk_token", "pad_token", "sep_token", "cls_token", "mask_token")


def open_package(path: Path | str) -> ModelPackage:
    """Read the declarations of a model folder or .onnx file; no weights are touched. GenaiError (exit 2) on anything
    missing or malformed, with file, line and key."""
    path = Path(path)
    if not path.exists():
        raise GenaiError(f"`{path}` does not exist", hint="give the folder of a model, or an .onnx file")
    if path.is_dir():
        return _with_neighbours(_open_folder(path), path)
    if path.suffix != ".onnx":
        raise GenaiError(f"`{path}` is not a folder and not an .onnx file", hint="give the folder that holds it")
    return _open_file(path)


def _open_folder(folder: Path) -> ModelPackage:
    if (folder / genai_config.CONFIG).is_file():
        return genai_config.from_genai_config(folder, read_json(folder / genai_config.CONFIG))
    if (folder / metadata.METADATA).is_file():
        return metadata.from_metadata(folder, read_yaml(folder / metadata.METADATA))
    model = hugging_face.find_model(folder)
    if model is None:
        raise GenaiError(_nothing(folder), hint="give a folder with genai_config.json, or an .onnx file")
    if (folder / hugging_face.CONFIG).is_file():
        return hugging_face.from_hugging_face(folder, read_json(folder / hugging_face.CONFIG), model)
    return replace(hugging_face.bare(model), path=folder)


def _nothing(folder: Path) -> str:
    names = sorted(entry.name for entry in folder.iterdir())
    listed = ", ".join(f"`{name}`" for name in names[:5]) + (", …" if len(names) > 5 else "")
    return f"`{folder}` is not a model package: no genai_config.json, no .onnx file; it holds {listed or 'nothing'}"


def _open_file(path: Path) -> ModelPackage:
    """A named .onnx file. The config beside it counts when it describes a single model: one of several precisions."""
    folder = path.parent.parent if path.parent.name == "onnx" else path.parent
    if (folder / hugging_face.CONFIG).is_file() and not (folder / genai_config.CONFIG).is_file():
        config = read_json(folder / hugging_face.CONFIG)
        return _with_neighbours(hugging_face.from_hugging_face(folder, config, path), folder)
    return _with_neighbours(hugging_face.bare(path), folder)


def _with_neighbours(package: ModelPackage, folder: Path) -> ModelPackage:
    """Add what lies beside the config: generation_config, tokenizer, chat template, special tokens."""
    generation = _optional_json(folder / "generation_config.json")
    tokens = _optional_json(folder / "tokenizer_config.json")
    special = {**_special(_optional_json(folder / "special_tokens_map.json")), **_special(tokens)}
    tokenizer = folder / "tokenizer.json"
    eos = set(package.eos_token_ids) | set(generation.ids("eos_token_id") if generation else ())
    if not eos and "eos_token" in special and tokenizer.is_file():
        eos = set(_ids_of(read_json(tokenizer), special["eos_token"]))
    processor = folder / "processor_config.json"
    package = replace(
        package,
        eos_token_ids=tuple(sorted(eos)),
        bos_token_id=_first(package.bos_token_id, generation, "bos_token_id"),
        pad_token_id=_first(package.pad_token_id, generation, "pad_token_id"),
        tokenizer=tokenizer if tokenizer.is_file() else None,
        chat_template=_chat_template(folder, tokens),
        special_tokens=special,
        processor_config=package.processor_config or (processor if processor.is_file() else None),
    )
    forms = [text for document in (generation, tokens) if document for text in document.warnings]
    return replace(package, warnings=(*package.warnings, *forms, *_doubts(package)))


def _doubts(package: ModelPackage) -> Iterator[str]:
    if not package.eos_token_ids and package.kind != "onnx":
        yield "no end-of-sequence token is declared: generation runs to its limit"
    beyond = [token for token in package.eos_token_ids if package.vocab_size and token >= package.vocab_size]
    if beyond:
        yield f"end-of-sequence ids {beyond} lie outside the vocabulary of {package.vocab_size}"
    if package.tokenizer is None:
        yield "no tokenizer.json: prompts must be given as token ids"


def _optional_json(path: Path) -> Document | None:
    return read_json(path) if path.is_file() else None


def _first(value: int | None, generation: Document | None, key: str) -> int | None:
    if value is not None or generation is None:
        return value
    return genai_config.optional_id(generation, key)


def _special(document: Document | None) -> dict[str, str]:
    """Named special tokens: a string, or an object with `content`."""
    found: dict[str, str] = {}
    for name in _SPECIAL if document else ():
        value = document.data.get(name) if document else None
        text = value.get("content") if isinstance(value, dict) else value
        if isinstance(text, str):
            found[name] = text
    return found


def _ids_of(tokenizer: Document, token: str) -> list[int]:
    """The id of an added token: where no config gives EOS as a number."""
    entries = tokenizer.get("added_tokens") or []
    return [entry["id"] for entry in entries if isinstance(entry, dict) and entry.get("content") == token]


def _chat_template(folder: Path, tokens: Document | None) -> str | None:
    """chat_template.jinja, else the one in tokenizer_config.json (a string, or a list with one named `default`)."""
    if (folder / "chat_template.jinja").is_file():
        return read_text(folder / "chat_template.jinja")
    declared = tokens.get("chat_template") if tokens else None
    if tokens is None or declared is None or isinstance(declared, str):
        return declared
    named = {entry.get("name"): entry.get("template") for entry in declared if isinstance(entry, dict)}
    template = named.get("default")
    if not isinstance(template, str):
        tokens.fail(("chat_template",), "a string, or a list with a template named `default`")
    return template
