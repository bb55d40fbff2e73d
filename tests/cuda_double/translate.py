"""PTX, as NVRTC writes it, to a shared library the driver double can run: `translate.py in.ptx out.so`."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from dataclasses import dataclass, field
from pathlib import Path

HERE = Path(__file__).resolve().parent
sys.path.insert(0, str(HERE))

from ptx_instructions import SIZES, Function, Instruction, Unknown, raw, register_name, translate  # noqa: E402

FLAGS = ("-std=c++17", "-O1", "-fPIC", "-w", "-fno-strict-aliasing", "-ffp-contract=off")
DECLARATION = re.compile(r"\.(\w+)\s+([\w$]+)(?:\[(\d*)\])?")
STATEMENT = re.compile(r"([{}])|([\w$]+):(?!:)|((?:[^;{}:]|::)*(?:\{[^;{}]*\}[^;{}]*)*);")


def split_args(text: str) -> list[str]:
    """At commas outside brackets."""
    parts = re.split(r",(?![^{\[(]*[}\])])", text)
    return [part.strip() for part in parts if part.strip()]


def align(offset: int, to: int) -> int:
    return (offset + to - 1) // to * to


@dataclass
class Memory:
    """Variables laid out one after another: shared memory, or the module's constants."""

    offsets: dict[str, int] = field(default_factory=dict)
    size: int = 0

    def place(self, name: str, alignment: int, nbytes: int) -> int:
        self.offsets[name] = align(self.size, alignment)
        self.size = self.offsets[name] + nbytes
        return self.offsets[name]


def strip_noise(text: str) -> str:
    text = re.sub(r"/\*.*?\*/|//[^\n]*", "", text, flags=re.S)
    return re.sub(r"^\s*\.(?:loc|file|pragma|section)\b[^\n]*$", "", text, flags=re.M)


def shared_variables(text: str) -> list[tuple[str, int, int]]:
    """(name, alignment, bytes) of static shared memory declared in the text."""
    found = re.findall(r"(?<!extern )\.shared \.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d+)\])?;", text)
    return [(name, int(alignment), SIZES[kind] * int(count or 1)) for alignment, kind, name, count in found]


def module_constants(head: str) -> tuple[Memory, bytes]:
    """The module's .global and .const variables as one run of bytes."""
    memory, content = Memory(), bytearray()
    pattern = r"\.(?:global|const)\s+\.align (\d+) \.(\w+) ([\w$]+)(?:\[(\d*)\])?(?:\s*=\s*(\{[^}]*\}|[^;]+))?;"
    for alignment, kind, name, count, values in re.findall(pattern, head):
        size, numbers = SIZES[kind], [int(v, 0) for v in re.findall(r"-?\w+", values or "")]
        data = b"".join((v % (1 << 8 * size)).to_bytes(size, "little") for v in numbers)
        at = memory.place(name, int(alignment), max(size * int(count or 1), len(data)))
        content.extend(bytes(at - len(content)))
        content.extend(data.ljust(memory.size - at, b"\0"))
    return memory, bytes(content)


@dataclass
class Kernel:
    name: str
    parameters: str
    directives: str
    body: str
    first_line: int


def kernels_of(text: str) -> tuple[list[Kernel], str]:
    """The .entry functions, and the text with them cut out."""
    found, head, at = [], "", 0
    for match in re.finditer(r"\.entry\s+([\w$]+)\s*\(([^)]*)\)([^{;]*)\{", text):
        end, depth = match.end(), 1
        while depth:
            depth += {"{": 1, "}": -1}.get(text[end], 0)
            end += 1
        line = text.count("\n", 0, match.end())
        found.append(Kernel(match[1], match[2], match[3], text[match.end() : end - 1], line))
        head += text[at : match.start()]
        at = end
    return found, head + text[at:]


class Body:
    """The statements of one kernel as C++."""

    def __init__(self, function: Function, first_line: int) -> None:
        self.function, self.first_line = function, first_line
        self.declarations: list[str] = []
        self.code: list[str] = []
        self.unknown: set[str] = set()
        self.depth = 0

    def add(self, text: str) -> None:
        text = re.sub(r"\.shared [^;]*;", "", text)
        for match in STATEMENT.finditer(text):
            brace, label, statement = match.groups()
            line = self.first_line + text.count("\n", 0, match.start()) + 1
            if brace:
                self.depth += 1 if brace == "{" else -1
                self.code.append(brace)
            elif label:
                self.code.append(f"{register_name(label)}:;")
            elif statement.strip():
                self._statement(statement.strip(), line)

    def _statement(self, text: str, line: int) -> None:
        if text.startswith(".reg"):
            self._registers(text)
        elif text.startswith(".local"):
            self._local(text)
        elif not text.startswith("."):
            self._instruction(text, line)

    def _registers(self, text: str) -> None:
        kind, rest = re.match(r"\.reg\s*\.(\w+)\s+(.*)", text, re.S).groups()
        c = "bool" if kind == "pred" else raw(kind)
        for name in split_args(rest):
            many = re.match(r"(.+)<(\d+)>$", name)
            names = [f"{many[1]}{n}" for n in range(int(many[2]))] if many else [name]
            self.function.registers.update(dict.fromkeys(names, kind))
            if self.depth == 0:
                self.declarations.append(f"{c} " + ", ".join(f"{register_name(n)}{{}}" for n in names) + ";")
            else:  # no initialiser: labels may jump over it
                self.code.append(f"{c} " + ", ".join(register_name(n) for n in names) + ";")

    def _local(self, text: str) -> None:
        alignment, kind, name, count = re.match(
            r"\.local\s+\.align\s+(\d+)\s+\.(\w+)\s+([\w$]+)\[(\d+)\]", text
        ).groups()
        variable, nbytes = register_name(name), int(count) * SIZES[kind]
        self.function.local.add(name)
        self.declarations.append(f"alignas({alignment}) char {variable}[{nbytes}]; memset({variable}, 0xFF, {nbytes});")

    def _instruction(self, text: str, line: int) -> None:
        guard = re.match(r"@(!?)(%?[\w$]+)\s+(.*)", text, re.S)
        if guard:
            text = guard[3]
        opcode, rest = re.match(r"([\w.:]+)\s*(.*)", text, re.S).groups()
        root, *modifiers = re.split(r"\.|::", opcode)
        try:
            code = translate(self.function, Instruction(root, modifiers, split_args(rest), line))
        except (Unknown, KeyError, IndexError) as reason:
            self.unknown.add(f"{opcode}: {reason}")
            code = f'fail(kLaunchFailed, "PTX not translated: {opcode}");'
        self.code.append(f"if ({guard[1]}{register_name(guard[2])}) {{ {code} }}" if guard else code)


def parameters_of(text: str) -> list[tuple[str, int]]:
    """(name, bytes) of each kernel parameter."""
    found = []
    for part in split_args(text):
        part = re.sub(r"\.ptr|\.(?:global|shared|local|const)\b|\.align \d+|\.param", "", part)
        kind, name, count = DECLARATION.search(part).groups()
        found.append((name, SIZES[kind] * int(count or 1)))
    return found


def emit_kernel(kernel: Kernel, head: str, constants: Memory) -> tuple[str, set[str]]:
    """C++ of one kernel, and the instructions in it that are not known."""
    shared = Memory()
    for variable in shared_variables(head) + shared_variables(kernel.body):
        shared.place(*variable)
    static = align(shared.size, 16)
    for name in re.findall(r"\.extern \.shared (?:\.align \d+ )?\.\w+ ([\w$]+)\[\]", head):
        shared.offsets[name] = static  # dynamic shared memory follows the static
    parameters = parameters_of(kernel.parameters)
    addresses = {name: f"(char*)args[{n}]" for n, (name, _) in enumerate(parameters)}
    body = Body(Function(addresses, shared.offsets, constants.offsets), kernel.first_line)
    body.add(kernel.body)
    limit = re.search(r"\.(?:maxntid|reqntid)\s+(\d+)", kernel.directives)
    sizes = ", ".join(str(size) for _, size in parameters) or "0"
    lines = "\n".join([*body.declarations, *body.code])
    return (
        f"static const size_t sizes_{kernel.name}[] = {{{sizes}}};\n"
        f"static void run_{kernel.name}(void** args) {{\n{lines}\nreturn;\n}}\n"
        f'static Registered entry_{kernel.name}("{kernel.name}", run_{kernel.name}, sizes_{kernel.name}, '
        f"{len(parameters)}, {static}, {limit[1] if limit else 0});\n"
    ), body.unknown


def to_cpp(ptx: str) -> tuple[str, set[str]]:
    """A whole PTX module as C++."""
    kernels, head = kernels_of(strip_noise(ptx))
    constants, content = module_constants(head)
    parts, unknown = ['#include "ptx.h"\n'], set()
    values = ", ".join(str(byte) for byte in content) or "0"
    parts.append(
        f"alignas(16) const u8 module_memory[] = {{{values}}};\nconst u64 module_memory_size = {len(content)};\n"
    )
    for kernel in kernels:
        code, missing = emit_kernel(kernel, head, constants)
        parts.append(code)
        unknown |= missing
    return "".join(parts), unknown


def compile_library(ptx_file: Path, library: Path) -> int:
    """Translate and compile; what is not known is told and traps when it runs."""
    code, unknown = to_cpp(ptx_file.read_text())
    for what in sorted(unknown):
        print(f"PTX not translated: {what}", file=sys.stderr)
    source, made = (library.with_suffix(f".{os.getpid()}.{kind}") for kind in ("cpp", "so"))  # others may build it too
    source.write_text(code)
    command = [
        "g++",
        *FLAGS,
        "-shared",
        "-Wl,-Bsymbolic",
        f"-I{os.environ.get('CUDA_DOUBLE_INCLUDE', HERE / 'src')}",
        str(source),
        "-o",
        str(made),
    ]
    result = subprocess.run(command, capture_output=True, text=True)
    if result.returncode:
        print(result.stderr[:4000], file=sys.stderr)
        return 1
    os.replace(made, library)
    source.unlink()
    return 0


if __name__ == "__main__":
    sys.exit(compile_library(Path(sys.argv[1]), Path(sys.argv[2])))
