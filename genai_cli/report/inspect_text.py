"""`genai inspect` for a terminal: one fact a line, what matters first."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from genai_cli.report.inspect import ComponentInfo, DecoderInfo, Inspection, KvGroup, NativeCoverage, TensorInfo

_LABEL = 14  # width of the first column
_SHOWN_OPS = 8
_AXES = {"BHSD": "[B, H_kv, S, D]", "BSM": "[B, S, H_kv * D]"}


def lines(found: Inspection, *, all_ops: bool = False) -> list[str]:
    """Everything, as lines without colour. `all_ops`: every op type, not the most frequent ones."""
    rows = list(_rows(found, all_ops))
    return [f"{found.path}  {found.kind} package" + (f", {found.model_type}" if found.model_type else ""), *rows]


def _rows(found: Inspection, all_ops: bool) -> Iterator[str]:
    for part in found.components:
        yield from _component(part, all_ops)
    if found.decoder:
        yield from _decoder(found.decoder)
    yield row("context", "unknown" if found.context_len is None else f"{found.context_len} tokens")
    yield row("token ids", _token_ids(found))
    yield row("text", _text(found))
    if found.search:
        yield row("search", ", ".join(f"{name} {_plain(value)}" for name, value in found.search.items()))
    for native in found.native:
        yield from _native(native)
    for gate in found.gates:
        yield row(gate.feature, f"{gate.engine}: {'yes' if gate.supported else 'no'}, {gate.reason}")
    for warning in found.warnings:
        yield row("warning", warning)


def row(label: str, text: str) -> str:
    """An indented line with its label; a long label gets a line's first words."""
    return f"  {label:<{_LABEL}}{'' if len(label) < _LABEL else '  '}{text}"


def _component(part: ComponentInfo, all_ops: bool) -> Iterator[str]:
    opsets = ", ".join(f"{domain} {version}" for domain, version in part.opsets.items())
    size = f"{amount(part.num_parameters)} parameters, {amount(part.weight_bytes)}B"
    yield row(
        part.role,
        f"{part.file}: {part.num_nodes} nodes, {size}; {opsets}" + (f"; by {part.producer}" if part.producer else ""),
    )
    yield row("  inputs", _tensors(part.inputs))
    yield row("  outputs", _tensors(part.outputs))
    shown = part.ops if all_ops else part.ops[:_SHOWN_OPS]
    more = f", and {len(part.ops) - len(shown)} more types" if len(part.ops) > len(shown) else ""
    yield row("  ops", ", ".join(f"{op.op} {op.count}" for op in shown) + more)
    for op in part.ops:
        if not op.supported:
            yield row("  not native", f"{op.op} x {op.count}: {op.reason}")


def _tensors(tensors: Sequence[TensorInfo]) -> str:
    """Names with types; a long tail of per-layer tensors as its first name and its count."""
    single = [tensor for tensor in tensors if not any(word.isdecimal() for word in tensor.name.split("."))]
    layered = [tensor for tensor in tensors if tensor not in single]
    parts = [_tensor(tensor) for tensor in single]
    if layered:
        parts.append(f"{_tensor(layered[0])} and {len(layered) - 1} like it")
    return ", ".join(parts)


def _tensor(tensor: TensorInfo) -> str:
    shape = (
        "unknown" if tensor.shape is None else "[" + ", ".join("?" if d is None else str(d) for d in tensor.shape) + "]"
    )
    return f"{tensor.name} {tensor.dtype} {shape}"


def _decoder(decoder: DecoderInfo) -> Iterator[str]:
    heads = " and ".join(map(str, decoder.num_heads))
    yield row(
        "layers",
        f"{decoder.num_layers}" + (f", {heads} query heads" if heads else ", attention spelled out in simple ops"),
    )
    yield row("vocabulary", "unknown" if decoder.vocab_size is None else str(decoder.vocab_size))
    for group in decoder.kv:
        yield row("KV", _kv(group))
    if len(decoder.kv) > 1:
        yield row("", f"{decoder.kv_bytes_per_token} bytes a token together")
    for state in decoder.states:
        yield row("state", f"{state.name} {state.dtype} {list(state.shape)}, {state.num_bytes} bytes")


def _kv(group: KvGroup) -> str:
    layers = f"layer{'s' if len(group.layers) > 1 else ''} {spans(group.layers)}"
    text = f"{layers}: {group.num_kv_heads} heads x {group.head_dim}, {group.dtype} {_AXES[group.axes]}"
    text += f", {group.bytes_per_token} bytes a token"
    text += f", capacity {group.capacity}" if group.capacity else ""
    return text + (f", window {group.window}" if group.window else "")


def _token_ids(found: Inspection) -> str:
    eos = " or ".join(map(str, found.eos_token_ids)) or "none"
    bos, pad = (("none" if value is None else str(value)) for value in (found.bos_token_id, found.pad_token_id))
    return f"eos {eos}, bos {bos}, pad {pad}"


def _text(found: Inspection) -> str:
    tokenizer = "tokenizer" if found.tokenizer else "no tokenizer: token ids only"
    return f"{tokenizer}, {'chat template' if found.chat_template else 'no chat template: prompts go in as they are'}"


def _native(native: NativeCoverage) -> Iterator[str]:
    if not native.supported:
        yield row(f"native {native.backend}", native.reason)
        return
    speed = "a step is recorded once and replayed" if native.replays else native.reason
    yield row(f"native {native.backend}", f"runs every node; {speed}")
    for op in native.host_ops:
        yield row("", f"in numpy between kernels: {op.op} x {op.count} ({op.reason})")


def amount(number: int) -> str:
    """Three digits with k, M or G (powers of 1000)."""
    for unit, size in (("G", 1e9), ("M", 1e6), ("k", 1e3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return f"{number} "


def spans(numbers: Sequence[int]) -> str:
    """0, 1, 2, 5 -> "0-2, 5"."""
    parts: list[list[int]] = []
    for number in numbers:
        if parts and parts[-1][-1] + 1 == number:
            parts[-1].append(number)
        else:
            parts.append([number])
    return ", ".join(str(part[0]) if len(part) == 1 else f"{part[0]}-{part[-1]}" for part in parts)


def _plain(value: object) -> str:
    return str(value).lower() if isinstance(value, bool) else str(value)
