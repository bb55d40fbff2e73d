"""PTX instructions as C++ statements. One that is not known raises Unknown: it traps, by name, when it runs."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import dataclass, field

SIZES = {
    "pred": 1, **{f"{kind}{n}": n // 8 for kind in "bus" for n in (8, 16, 32, 64)},
    "f16": 2, "bf16": 2, "f16x2": 4, "bf16x2": 4, "f32": 4, "f64": 8,
}  # fmt: skip
FLOATS = ("f16", "bf16", "f32", "f64")
SPACES = ("param", "shared", "global", "const", "local")
WIDER = {"u16": "u32", "s16": "s32", "u32": "u64", "s32": "s64", "u64": "unsigned __int128", "s64": "__int128"}
COMPARE = {
    "eq": "==",
    "ne": "!=",
    "lt": "<",
    "le": "<=",
    "gt": ">",
    "ge": ">=",
    "lo": "<",
    "ls": "<=",
    "hi": ">",
    "hs": ">=",
}
LOGIC = {"and": "&", "or": "|", "xor": "^"}
SPECIAL = {
    **{f"%tid.{d}": f"self().index.{d}" for d in "xyz"},
    **{f"%ctaid.{d}": f"block->index.{d}" for d in "xyz"},
    **{f"%ntid.{d}": f"block->dim.{d}" for d in "xyz"},
    **{f"%nctaid.{d}": f"block->grid.{d}" for d in "xyz"},
    "%laneid": "self().lane", "WARP_SZ": "32u",
}  # fmt: skip


class Unknown(Exception):
    """Something in the PTX that the translator does not know."""


def ctype(ptx_type: str) -> str:
    """The C++ type for a PTX type; 16-bit floats are their bits."""
    if ptx_type == "pred":
        return "bool"
    if ptx_type in ("f32", "f64") or ptx_type[0] in "us":
        return ptx_type
    return f"u{SIZES[ptx_type] * 8}"


def raw(ptx_type: str) -> str:
    """The unsigned type a register of this size is kept in."""
    return f"u{SIZES[ptx_type] * 8}"


def register_name(name: str) -> str:
    """A C++ identifier for a register or label."""
    return "R_" + re.sub(r"\W", "_", name)


def vector(operand: str) -> list[str]:
    """`{a, b}` or `a` as a list."""
    operand = operand.strip()
    return [part.strip() for part in operand[1:-1].split(",")] if operand.startswith("{") else [operand]


@dataclass
class Instruction:
    """`root.modifier.modifier arg, arg` at a line of the PTX."""

    root: str
    modifiers: list[str]
    args: list[str]
    line: int

    @property
    def types(self) -> list[str]:
        return [m for m in self.modifiers if m in SIZES]

    @property
    def type(self) -> str:
        return self.types[-1]

    def space(self) -> str:
        return next((m for m in self.modifiers if m in SPACES), "generic")


@dataclass
class Function:
    """What names mean inside one kernel."""

    parameters: dict[str, str]  # name -> C++ expression of its address
    shared: dict[str, int]  # name -> offset in the block's shared memory
    module_memory: dict[str, int]  # name -> offset in module_memory
    registers: dict[str, str] = field(default_factory=dict)
    local: set[str] = field(default_factory=set)

    def read(self, operand: str, ptx_type: str) -> str:
        """An operand as an expression of ctype(ptx_type)."""
        operand, c = operand.strip(), ctype(ptx_type)
        if operand.startswith("!"):
            return f"(!{self.read(operand[1:], ptx_type)})"
        if operand in self.registers:
            return self._register(operand, ptx_type)
        if operand in SPECIAL:
            return f"(({c}){SPECIAL[operand]})"
        if re.match(r"0[fFdD][0-9a-fA-F]+$", operand):
            return self._float_literal(operand, ptx_type)
        if re.match(r"-?\d", operand):
            return f"(({c}){operand.rstrip('U')}{'ull' if 'x' in operand else 'll'})"
        return f"(({c})({self.symbol(operand)}))"

    def _register(self, name: str, ptx_type: str) -> str:
        own, variable = self.registers[name], register_name(name)
        if "pred" in (own, ptx_type):
            return variable
        if ptx_type in ("f32", "f64"):
            if SIZES[own] != SIZES[ptx_type]:
                variable = f"({raw(ptx_type)}){variable}"
            return f"bits<{ptx_type}>({variable})"
        return f"(({ctype(ptx_type)}){variable})"

    @staticmethod
    def _float_literal(operand: str, ptx_type: str) -> str:
        digits = operand[2:]
        if ptx_type in ("f32", "f64"):
            return f"bits<{ptx_type}>({raw(ptx_type)}(0x{digits}ull))"
        return f"(({ctype(ptx_type)})0x{digits}ull)"

    def symbol(self, operand: str) -> str:
        match = re.match(r"([\w$]+)(?:\s*\+\s*(-?\d+))?$", operand)
        if not match:
            raise Unknown(f"operand {operand}")
        name, offset = match.group(1), match.group(2) or "0"
        if name in self.shared:
            return f"{self.shared[name]}u + {offset}"
        if name in self.local:
            return f"(u64){register_name(name)} + {offset}"
        if name in self.module_memory:
            return f"(u64)module_memory + {self.module_memory[name]} + {offset}"
        raise Unknown(f"operand {operand}")

    def number(self, operand: str, ptx_type: str) -> str:
        """An operand to compute with: 16-bit floats widened."""
        value = self.read(operand, ptx_type)
        return f"from_{ptx_type}({value})" if ptx_type in ("f16", "bf16") else value

    def write(self, target: str, ptx_type: str, value: str) -> str:
        """Store an expression of ptx_type into a register (which may be wider)."""
        if target == "_":
            return f"(void)({value});"
        own, variable = self.registers[target], register_name(target)
        if own == "pred":
            return f"{variable} = bool({value});"
        if ptx_type in ("f16", "bf16"):
            return f"{variable} = to_{ptx_type}({value});"
        if ptx_type in ("f32", "f64"):
            return f"{variable} = bits<{raw(ptx_type)}>({ptx_type}({value}));"
        extend = "(s64)" if ptx_type[0] == "s" else ""
        return f"{variable} = ({raw(own)}){extend}({ctype(ptx_type)})({value});"

    def pointer(self, instruction: Instruction, operand: str, ptx_type: str, count: int = 1) -> str:
        """A checked pointer for `[base + offset]`."""
        match = re.match(r"\[\s*([\w$%]+)(?:\s*\+\s*(-?\d+))?\s*\]$", operand.strip())
        if not match:
            raise Unknown(f"address {operand}")
        base, offset, c = match.group(1), match.group(2) or "0", ctype(ptx_type)
        if base in self.parameters:
            return f"(({c}*)({self.parameters[base]} + {offset}))"
        address = register_name(base) if base in self.registers else self.symbol(base)
        where = "shared" if instruction.space() == "shared" else "memory"
        return f"{where}<{c}, {count}>((u64)({address}) + {offset}ll)"


Handler = Callable[[Function, Instruction], str]
HANDLERS: dict[str, Handler] = {}


def handles(*roots: str) -> Callable[[Handler], Handler]:
    def register(handler: Handler) -> Handler:
        for root in roots:
            HANDLERS[root] = handler
        return handler

    return register


def _float_result(i: Instruction, expression: str) -> str:
    if i.type == "f32" and "ftz" in i.modifiers:
        expression = f"flush({expression})"
    return f"saturate({expression})" if "sat" in i.modifiers else expression


def _float_arithmetic(f: Function, i: Instruction) -> str:
    x = [f.number(arg, i.type) for arg in i.args[1:]]
    if i.root in ("fma", "mad"):
        value = f"std::fma({x[0]}, {x[1]}, {x[2]})"
    elif i.root in ("min", "max"):
        value = f"std::f{i.root}({x[0]}, {x[1]})"
        if "NaN" in i.modifiers:
            value = f"({x[0]} != {x[0]} || {x[1]} != {x[1]} ? NAN : {value})"
    elif i.root in ("abs", "neg"):
        value = f"std::fabs({x[0]})" if i.root == "abs" else f"-{x[0]}"
    else:
        value = f"{x[0]} {dict(add='+', sub='-', mul='*', div='/')[i.root]} {x[1]}"
    return f.write(i.args[0], i.type, _float_result(i, value))


def _product(f: Function, i: Instruction) -> tuple[str, str]:
    """The multiplied part of mul and mad, and its type."""
    x, y = (f.read(arg, i.type) for arg in i.args[1:3])
    unsigned = f"u{i.type[1:]}"
    if "wide" in i.modifiers:
        wide = WIDER[i.type]
        return f"(({wide}){x} * ({wide}){y})", wide
    if "hi" in i.modifiers:
        wide = WIDER[i.type]
        return f"(({ctype(i.type)})((({wide}){x} * ({wide}){y}) >> {SIZES[i.type] * 8}))", i.type
    return f"(({unsigned}){x} * ({unsigned}){y})", i.type


def _integer_arithmetic(f: Function, i: Instruction) -> str:
    c, unsigned = ctype(i.type), f"u{i.type[1:]}"
    if i.root in ("mul", "mad"):
        product, result = _product(f, i)
        return f.write(i.args[0], result, product + (f" + {f.read(i.args[3], result)}" if i.root == "mad" else ""))
    x = [f.read(arg, i.type) for arg in i.args[1:]]
    if i.root in ("add", "sub"):
        value = f"({unsigned}){x[0]} {'+' if i.root == 'add' else '-'} ({unsigned}){x[1]}"
    elif i.root in ("div", "rem"):
        value = f"{x[1]} == 0 ? ({c})-1 : {x[0]} {'/' if i.root == 'div' else '%'} {x[1]}"
    elif i.root in ("min", "max"):
        value = f"std::{i.root}<{c}>({x[0]}, {x[1]})"
    elif i.root == "abs":
        value = f"{x[0]} < 0 ? -({unsigned}){x[0]} : ({unsigned}){x[0]}"
    else:
        value = f"-({unsigned}){x[0]}"
    return f.write(i.args[0], i.type, value)


@handles("add", "sub", "mul", "div", "rem", "min", "max", "fma", "mad", "abs", "neg")
def _arithmetic(f: Function, i: Instruction) -> str:
    if "cc" in i.modifiers or i.type.endswith("x2"):
        raise Unknown("carry or packed arithmetic")
    return _float_arithmetic(f, i) if i.type in FLOATS else _integer_arithmetic(f, i)


@handles("and", "or", "xor")
def _logic(f: Function, i: Instruction) -> str:
    return f.write(i.args[0], i.type, f"{f.read(i.args[1], i.type)} {LOGIC[i.root]} {f.read(i.args[2], i.type)}")


@handles("not")
def _not(f: Function, i: Instruction) -> str:
    return f.write(i.args[0], i.type, f"{'!' if i.type == 'pred' else '~'}{f.read(i.args[1], i.type)}")


@handles("shl", "shr")
def _shift(f: Function, i: Instruction) -> str:
    name = "shift_left" if i.root == "shl" else "shift_right"
    return f.write(
        i.args[0], i.type, f"{name}<{ctype(i.type)}>({f.read(i.args[1], i.type)}, {f.read(i.args[2], 'u32')})"
    )


@handles("shf")
def _funnel(f: Function, i: Instruction) -> str:
    low, high, by = (f.read(arg, "u32") for arg in i.args[1:4])
    by = f"std::min<u32>({by}, 32)" if "clamp" in i.modifiers else f"({by} & 31)"
    return f.write(i.args[0], "b32", f"funnel({low}, {high}, {by}, {'true' if i.modifiers[0] == 'r' else 'false'})")


@handles("prmt", "lop3")
def _bytes(f: Function, i: Instruction) -> str:
    name = "permute" if i.root == "prmt" else "lop3"
    return f.write(i.args[0], "b32", f"{name}({', '.join(f.read(arg, 'u32') for arg in i.args[1:])})")


@handles("dp4a")
def _dot4(f: Function, i: Instruction) -> str:
    signs = ["s8" if m == "s32" else "u8" for m in i.types]
    a, b, total = f.read(i.args[1], "u32"), f.read(i.args[2], "u32"), f.read(i.args[3], "s32")
    return f.write(i.args[0], "s32", f"dot4<{signs[0]}, {signs[-1]}>({a}, {b}, {total})")


@handles("bfe", "bfi")
def _bit_field(f: Function, i: Instruction) -> str:
    name = "extract" if i.root == "bfe" else "insert"
    values = [f.read(arg, i.type) for arg in i.args[1:-2]]
    place = [f.read(arg, "u32") for arg in i.args[-2:]]
    return f.write(i.args[0], i.type, f"{name}<{ctype(i.type)}>({', '.join(values + place)})")


@handles("brev", "popc", "clz")
def _count_bits(f: Function, i: Instruction) -> str:
    x, width = f.read(i.args[1], i.type), SIZES[i.type] * 8
    if i.root == "brev":
        return f.write(i.args[0], i.type, f"reverse_bits<{ctype(i.type)}>({x})")
    if i.root == "popc":
        return f.write(i.args[0], "u32", f"__builtin_popcountll((u64){x})")
    return f.write(i.args[0], "u32", f"{x} ? __builtin_clzll((u64){x}) - {64 - width} : {width}")


@handles("mov")
def _mov(f: Function, i: Instruction) -> str:
    targets, sources = vector(i.args[0]), vector(i.args[1])
    if len(targets) > 1:
        part = SIZES[i.type] * 8 // len(targets)
        writes = " ".join(f.write(t, f"b{part}", f"all >> {n * part}") for n, t in enumerate(targets))
        return f"{{ u64 all = {f.read(i.args[1], i.type)}; {writes} }}"
    if len(sources) > 1:
        part = SIZES[i.type] * 8 // len(sources)
        value = " | ".join(f"(u64){f.read(s, f'b{part}')} << {n * part}" for n, s in enumerate(sources))
        return f.write(targets[0], i.type, value)
    plain = f"b{SIZES[i.type] * 8}" if i.type != "pred" else "pred"
    return f.write(targets[0], plain, f.read(sources[0], plain))


@handles("cvta")
def _cvta(f: Function, i: Instruction) -> str:
    value = f.read(i.args[1], "u64")
    if i.space() == "shared":
        value = f"{value} - (u64)block->shared" if "to" in i.modifiers else f"(u64)block->shared + {value}"
    return f.write(i.args[0], "u64", value)


@handles("ld", "ldu")
def _load(f: Function, i: Instruction) -> str:
    targets = vector(i.args[0])
    plain = f"b{SIZES[i.type] * 8}" if i.type[0] not in "us" else i.type
    pointer = f.pointer(i, i.args[1], i.type, len(targets))
    if len(targets) == 1:
        return f.write(targets[0], plain, f"*({ctype(plain)}*){pointer}")
    writes = " ".join(f.write(t, plain, f"values[{n}]") for n, t in enumerate(targets))
    return f"{{ {ctype(plain)} values[{len(targets)}]; memcpy(values, {pointer}, sizeof values); {writes} }}"


@handles("st")
def _store(f: Function, i: Instruction) -> str:
    sources = vector(i.args[1])
    stores = " ".join(f"to[{n}] = {f.read(s, i.type)};" for n, s in enumerate(sources))
    return f"{{ auto* to = {f.pointer(i, i.args[0], i.type, len(sources))}; {stores} }}"


def _condition(f: Function, i: Instruction) -> str:
    compare = i.modifiers[0]
    x, y = f.number(i.args[1], i.type), f.number(i.args[2], i.type)
    unordered = f"({x} != {x} || {y} != {y})"
    if compare in ("nan", "num"):
        return unordered if compare == "nan" else f"!{unordered}"
    if i.type not in FLOATS:
        return f"({x} {COMPARE[compare]} {y})"
    if len(compare) == 3:  # ltu, geu, ...: true when unordered
        return f"({unordered} || {x} {COMPARE[compare[:2]]} {y})"
    return f"(!{unordered} && {x} {COMPARE[compare]} {y})"


@handles("setp")
def _setp(f: Function, i: Instruction) -> str:
    combine = next((LOGIC[m] for m in i.modifiers if m in LOGIC), None)
    also = f" {combine} {f.read(i.args[3], 'pred')}" if combine else ""
    targets = [t.strip() for t in i.args[0].split("|")]
    writes = f.write(targets[0], "pred", f"yes{also}")
    if len(targets) > 1:
        writes += " " + f.write(targets[1], "pred", f"!yes{also}")
    return f"{{ bool yes = {_condition(f, i)}; {writes} }}"


@handles("selp")
def _selp(f: Function, i: Instruction) -> str:
    plain = f"b{SIZES[i.type] * 8}"
    choice = f"{f.read(i.args[3], 'pred')} ? {f.read(i.args[1], plain)} : {f.read(i.args[2], plain)}"
    return f.write(i.args[0], plain, choice)


@handles("cvt")
def _convert(f: Function, i: Instruction) -> str:
    to, source = i.types[0], i.types[-1]
    if to in ("f16x2", "bf16x2"):
        half = to[:-2]
        return f.write(
            i.args[0],
            "b32",
            f"(u32)to_{half}({f.read(i.args[1], 'f32')}) << 16 | to_{half}({f.read(i.args[2], 'f32')})",
        )
    value = f.number(i.args[1], source)
    rounding = {"rni": "nearbyint", "rzi": "trunc", "rmi": "floor", "rpi": "ceil"}
    rounded = next((f"std::{rounding[m]}({value})" for m in i.modifiers if m in rounding), value)
    if to in FLOATS:
        return f.write(i.args[0], to, f"saturate({rounded})" if "sat" in i.modifiers else rounded)
    if source in FLOATS:
        return f.write(i.args[0], to, f"to_integer<{ctype(to)}>({rounded})")
    if "sat" in i.modifiers:
        limits = f"std::numeric_limits<{to}>"
        return f.write(i.args[0], to, f"std::clamp<s64>({value}, {limits}::min(), {limits}::max())")
    return f.write(i.args[0], to, value)


MATH = {
    "sqrt": "std::sqrt({})",
    "rsqrt": "1 / std::sqrt({})",
    "rcp": "1 / ({})",
    "ex2": "std::exp2({})",
    "lg2": "std::log2({})",
    "sin": "std::sin({})",
    "cos": "std::cos({})",
    "tanh": "std::tanh({})",
}


@handles(*MATH)
def _math(f: Function, i: Instruction) -> str:
    """The approximate forms are exact here: how far a device is from them must come from a device."""
    return f.write(i.args[0], i.type, _float_result(i, MATH[i.root].format(f.number(i.args[1], i.type))))


@handles("copysign")
def _copysign(f: Function, i: Instruction) -> str:
    return f.write(i.args[0], i.type, f"std::copysign({f.read(i.args[2], i.type)}, {f.read(i.args[1], i.type)})")


@handles("bar", "barrier")
def _barrier(f: Function, i: Instruction) -> str:
    if "warp" in i.modifiers:
        return f"services->exchange({f.read(i.args[0], 'u32')}, 0);"
    if "red" in i.modifiers:
        votes = f"services->barrier({i.line}, {f.read(i.args[-1], 'pred')})"
        if "popc" in i.modifiers:
            return f.write(i.args[0], "u32", f"{votes}.count")
        return f.write(i.args[0], "pred", f"{votes}.{'all' if 'and' in i.modifiers else 'any'}")
    if i.args != ["0"]:
        raise Unknown("named or partial barrier")
    return f"services->barrier({i.line}, false);"


@handles("shfl")
def _shuffle(f: Function, i: Instruction) -> str:
    mode = next(m for m in i.modifiers if m in ("up", "down", "bfly", "idx"))
    targets = i.args[0].split("|")
    valid = f"&{register_name(targets[1])}" if len(targets) > 1 and targets[1] != "_" else "nullptr"
    mask, value, by, control = (f.read(i.args[n], "u32") for n in (4, 1, 2, 3))
    return f.write(targets[0], "b32", f"shuffle({mask}, {value}, {by}, {control}, Shuffle::{mode}, {valid})")


@handles("mma")
def _tensor_product(f: Function, i: Instruction) -> str:
    if "m16n8k16" not in i.modifiers or i.types[0] != "f32" or i.types[1] not in ("f16", "bf16"):
        raise Unknown("mma")
    d, a, b, c = (vector(arg) for arg in i.args)
    words = [f.read(arg, "b32") for arg in (*a, *b)]
    sums = [f.read(arg, "f32") for arg in c]
    kept = " ".join(f.write(target, "f32", f"sums[{n}]") for n, target in enumerate(d))
    brain = "true" if i.types[1] == "bf16" else "false"
    return f"{{ f32 sums[4] = {{{', '.join(sums)}}}; tensor_product<{brain}>(sums, {', '.join(words)}); {kept} }}"


@handles("vote")
def _vote(f: Function, i: Instruction) -> str:
    mask, vote = f.read(i.args[2], "u32"), f.read(i.args[1], "pred")
    if "ballot" in i.modifiers:
        return f.write(i.args[0], "b32", f"ballot({mask}, {vote})")
    return f.write(i.args[0], "pred", f"vote_{i.modifiers[1]}({mask}, {vote})")


@handles("atom", "red")
def _atomic(f: Function, i: Instruction) -> str:
    args = i.args if i.root == "atom" else ["_", *i.args]
    value, c = f.number(args[2], i.type), ctype(i.type)
    results = {
        "add": f"old + {value}",
        "min": f"std::min<{c}>(old, {value})",
        "max": f"std::max<{c}>(old, {value})",
        "exch": value,
    }
    name = next((m for m in i.modifiers if m in results), None)
    if name is None or i.type in ("f16", "bf16"):
        raise Unknown("atomic")
    keep = f.write(args[0], i.type, "old")
    return f"{{ {c}* at = {f.pointer(i, args[1], i.type)}; {c} old = *at; *at = {results[name]}; {keep} }}"


@handles("membar", "fence", "prefetch", "griddepcontrol")
def _nothing(f: Function, i: Instruction) -> str:
    return ";"


@handles("ret", "exit")
def _return(f: Function, i: Instruction) -> str:
    return "return;"


@handles("trap")
def _trap(f: Function, i: Instruction) -> str:
    return 'fail(kLaunchFailed, "trap");'


@handles("bra")
def _branch(f: Function, i: Instruction) -> str:
    return f"goto {register_name(i.args[0])};"


def translate(f: Function, i: Instruction) -> str:
    """One instruction as C++."""
    if i.root not in HANDLERS:
        raise Unknown(i.root)
    return HANDLERS[i.root](f, i)
