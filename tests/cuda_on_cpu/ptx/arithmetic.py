"""Handlers of PTX arithmetic, logic, comparison and conversion: `opcode head -> function(f, parts, operands) -> C++`.

`f` is the Function, `parts` the opcode split at dots ("add.rn.f32" -> ["add", "rn", "f32"]), `a` the operands.
"""

from __future__ import annotations

from collections.abc import Callable

from tests.cuda_on_cpu.ptx.function import C_TYPES, Function
from tests.cuda_on_cpu.ptx.parser import SIZES, UnsupportedError

Handler = Callable[[Function, list[str], list[str]], str]
HANDLERS: dict[str, Handler] = {}


def handles(*heads: str) -> Callable[[Handler], Handler]:
    def register(function: Handler) -> Handler:
        for head in heads:
            HANDLERS[head] = function
        return function

    return register


_FLOAT = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "div": "{0} / {1}",
          "fma": "std::fma({0}, {1}, {2})", "mad": "std::fma({0}, {1}, {2})",
          "min": "std::fmin({0}, {1})", "max": "std::fmax({0}, {1})"}  # fmt: skip
_PACKED = {"add": "x + y", "sub": "x - y", "mul": "x * y", "min": "std::fmin(x, y)", "max": "std::fmax(x, y)",
           "fma": "std::fma(x, y, z)"}  # fmt: skip


@handles("add", "sub", "mul", "mad", "fma", "div", "rem", "min", "max")
def arithmetic(f: Function, p: list[str], a: list[str]) -> str:
    head, kind = p[0], p[-1]
    if kind in ("f32", "f64"):
        expression = _FLOAT[head].format(*(f.value(x, kind) for x in a[1:]))
        if "NaN" in p:  # min.NaN: NaN wins
            x, y = f.value(a[1], kind), f.value(a[2], kind)
            expression = f"(std::isnan({x}) || std::isnan({y})) ? NAN : {expression}"
        if "sat" in p:
            expression = f"std::fmin(std::fmax({expression}, 0.0f), 1.0f)"
        return f.assign(a[0], kind, f"ftz({expression})" if "ftz" in p else expression)
    if kind in ("f16", "bf16", "f16x2", "bf16x2"):
        names = ", ".join(f"float {n}" for n in "xyz"[: len(a) - 1])
        count, bf16 = (2 if kind.endswith("x2") else 1), str(kind.startswith("b")).lower()
        operation = f"[]({names}) {{ return {_PACKED[head]}; }}"
        operands = ", ".join(f.value(x, kind) for x in a[1:])
        return f.assign(a[0], kind, f"packed_half<{bf16}, {count}>({operation}, {operands})")
    return _integer(f, head, p, a)


def _integer(f: Function, head: str, p: list[str], a: list[str]) -> str:
    kind = p[-1]
    bits, signed = SIZES[kind] * 8, kind[0] == "s"
    unsigned = f"u{bits}"
    if "wide" in p:
        wide = f"{'' if signed else 'u'}int{2 * bits}_t"
        expression = f"({wide}){f.value(a[1], kind)} * ({wide}){f.value(a[2], kind)}"
        if head == "mad":
            expression = f"({expression}) + ({wide}){f.value(a[3], f'{kind[0]}{2 * bits}')}"
        return f.assign(a[0], f"u{2 * bits}", f"(uint{2 * bits}_t)({expression})")
    if "hi" in p:
        wide = "__int128" if bits == 64 else f"int{2 * bits}_t"
        wide = wide if signed else f"unsigned {wide}" if bits == 64 else f"u{wide}"
        expression = f"(uint{bits}_t)((({wide}){f.value(a[1], kind)} * ({wide}){f.value(a[2], kind)}) >> {bits})"
        if head == "mad":
            expression += f" + {f.value(a[3], unsigned)}"
        return f.assign(a[0], unsigned, expression)
    typed, raw = [f.value(x, kind) for x in a[1:]], [f.value(x, unsigned) for x in a[1:]]
    if head in ("div", "rem"):  # the hardware does not trap on 0; C++ would
        sign = "/" if head == "div" else "%"
        return f.assign(
            a[0], unsigned, f"{typed[1]} == 0 ? (uint{bits}_t)~0ull : (uint{bits}_t)({typed[0]} {sign} {typed[1]})"
        )
    expression = {"add": "{0} + {1}", "sub": "{0} - {1}", "mul": "{0} * {1}", "mad": "{0} * {1} + {2}"}.get(head, "")
    if expression:
        return f.assign(a[0], unsigned, f"(uint{bits}_t)({expression.format(*raw)})")
    return f.assign(a[0], unsigned, f"(uint{bits}_t)std::{head}({typed[0]}, {typed[1]})")


@handles("and", "or", "xor", "not", "cnot")
def logic(f: Function, p: list[str], a: list[str]) -> str:
    kind = p[-1]
    x = [f.value(one, kind) for one in a[1:]]
    if p[0] == "not":
        return f.assign(a[0], kind, f"!{x[0]}" if kind == "pred" else f"({C_TYPES[kind]})~{x[0]}")
    if p[0] == "cnot":
        return f.assign(a[0], kind, f"{x[0]} == 0")
    return f.assign(a[0], kind, f"{x[0]} {dict(zip(('and', 'or', 'xor'), '&|^'))[p[0]]} {x[1]}")


@handles("shl", "shr")
def shift(f: Function, p: list[str], a: list[str]) -> str:
    kind = p[-1]
    bits = SIZES[kind] * 8
    count, unsigned = f.value(a[2], "u32"), f"u{bits}"
    if kind[0] == "s":
        return f.assign(a[0], kind, f"({C_TYPES[kind]})({f.value(a[1], kind)} >> std::min({count}, {bits - 1}u))")
    sign = "<<" if p[0] == "shl" else ">>"
    shifted = f"(uint{bits}_t)({f.value(a[1], unsigned)} {sign} ({count} & {bits - 1}))"
    return f.assign(a[0], unsigned, f"({count} >= {bits}u ? (uint{bits}_t)0 : {shifted})")


@handles("shf")
def funnel(f: Function, p: list[str], a: list[str]) -> str:
    side = "left" if p[1] == "l" else "right"
    operands = ", ".join(f.value(x, "b32") for x in a[1:])
    return f.assign(a[0], "b32", f"funnel_{side}({operands}, {str('clamp' in p).lower()})")


@handles("neg", "abs")
def sign(f: Function, p: list[str], a: list[str]) -> str:
    kind, x = p[-1], f.value(a[1], p[-1])
    if kind in ("f32", "f64"):
        expression = f"-{x}" if p[0] == "neg" else f"std::fabs({x})"
        return f.assign(a[0], kind, f"ftz({expression})" if "ftz" in p else expression)
    if "f" in kind:  # halves: flip or clear the sign bits
        mask = "0x80008000u" if kind.endswith("x2") else "0x8000u"
        return f.assign(a[0], kind, f"{x} ^ {mask}" if p[0] == "neg" else f"{x} & ~{mask}")
    return f.assign(
        a[0], kind, f"({C_TYPES[kind]})(0 - (u{C_TYPES[kind]}){x})" if p[0] == "neg" else f"({x} < 0 ? -{x} : {x})"
    )


@handles("copysign")
def copy_sign(f: Function, p: list[str], a: list[str]) -> str:
    return f.assign(a[0], p[-1], f"std::copysign({f.value(a[2], p[-1])}, {f.value(a[1], p[-1])})")


@handles("selp")
def select(f: Function, p: list[str], a: list[str]) -> str:
    return f.assign(a[0], p[-1], f"{f.value(a[3], 'pred')} ? {f.value(a[1], p[-1])} : {f.value(a[2], p[-1])}")


_ORDERED = {
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


@handles("setp", "set")
def compare(f: Function, p: list[str], a: list[str]) -> str:
    if p[0] == "set":
        raise UnsupportedError(".".join(p))
    test, kind = p[1], p[-1]
    half = kind in ("f16", "bf16")
    x, y = (f.value(one, "u" + kind[1:] if kind[0] == "b" and not half else kind) for one in a[1:3])
    if half:
        x, y = (f"half_value<{str(kind == 'bf16').lower()}>({one})" for one in (x, y))
    unordered = f"(std::isnan({x}) || std::isnan({y}))"
    floating = "f" in kind
    if test == "nan":
        expression = unordered
    elif test == "num":
        expression = f"!{unordered}"
    elif floating and len(test) == 3:
        expression = f"({x} {_ORDERED[test[:2]]} {y} || {unordered})"
    elif floating and test == "ne":
        expression = f"({x} != {y} && !{unordered})"
    else:
        expression = f"({x} {_ORDERED[test]} {y})"
    combine = {"and": "&", "or": "|", "xor": "^"}.get(p[2])
    rest = f" {combine} {f.value(a[3], 'pred')}" if combine else ""
    targets = a[0].split("|")
    first = f.assign(targets[0], "pred", f"t_{rest}")
    second = f.assign(targets[1], "pred", f"(!t_){rest}") if len(targets) > 1 else ""
    return f"{{ const bool t_ = {expression}; {second} {first} }}"


_UNARY = {"ex2": "std::exp2({})", "lg2": "std::log2({})", "rcp": "1 / {}", "sqrt": "std::sqrt({})",
          "sin": "std::sin({})", "rsqrt": "1 / std::sqrt({})",
          "tanh": "std::tanh({})", "cos": "std::cos({})"}  # fmt: skip


@handles(*_UNARY)
def transcendental(f: Function, p: list[str], a: list[str]) -> str:
    if p[-1] not in ("f32", "f64"):
        raise UnsupportedError(".".join(p))
    expression = _UNARY[p[0]].format(f.value(a[1], p[-1]))
    return f.assign(a[0], p[-1], f"ftz({expression})" if "ftz" in p else expression)


@handles("bfe", "bfi", "prmt", "lop3", "popc", "clz", "brev", "bfind", "dp4a")
def bits(f: Function, p: list[str], a: list[str]) -> str:
    head, kind = p[0], p[-1]
    x = [f.value(one, kind) for one in a[1:3]]
    if head == "bfe":
        return f.assign(
            a[0], kind, f"bit_field_extract<{C_TYPES[kind]}>({x[0]}, {f.value(a[2], 'u32')}, {f.value(a[3], 'u32')})"
        )
    if head == "bfi":
        return f.assign(
            a[0],
            kind,
            f"bit_field_insert<{C_TYPES[kind]}>({x[0]}, {x[1]}, {f.value(a[3], 'u32')}, {f.value(a[4], 'u32')})",
        )
    if head == "prmt" and len(p) == 2:
        return f.assign(a[0], kind, f"__byte_perm({x[0]}, {x[1]}, {f.value(a[3], kind)})")
    if head == "lop3":
        return f.assign(a[0], kind, f"lop3({x[0]}, {x[1]}, {f.value(a[3], kind)}, {a[4]})")
    if head == "popc":
        return f.assign(a[0], "u32", f"__builtin_popcountll({x[0]})")
    if head == "clz":
        return f.assign(a[0], "u32", f"leading_zeros<{SIZES[kind] * 8}>({x[0]})")
    if head == "brev" and kind == "b32":
        return f.assign(a[0], kind, f"__brev({x[0]})")
    if head == "bfind" and kind in ("u32", "b32"):
        found = f"leading_zeros<32>({x[0]})" if "shiftamt" in p else f"31 - leading_zeros<32>({x[0]})"
        return f.assign(a[0], "u32", f"{x[0]} ? {found} : 0xffffffffu")
    raise UnsupportedError(".".join(p))


@handles("cvt")
def convert(f: Function, p: list[str], a: list[str]) -> str:
    to, source = p[-2], p[-1]
    rounding = next((x[1] for x in p if x in ("rni", "rzi", "rmi", "rpi")), "")
    is_half = lambda kind: kind in ("f16", "bf16")  # noqa: E731
    bf16 = lambda kind: str(kind.startswith("b")).lower()  # noqa: E731
    if to in ("f16x2", "bf16x2") and source == "f32":
        high, low = (f"(uint32_t)to_half_bits<{bf16(to)}>({f.value(x, 'f32')})" for x in a[1:3])
        if "relu" in p:
            raise UnsupportedError(".".join(p))
        return f.assign(a[0], "b32", f"{low} | {high} << 16")
    if to in ("e4m3x2", "e5m2x2") and source == "f32":
        return f.assign(a[0], "b16", f"floats_to_fp8x2({f.value(a[1], 'f32')}, {f.value(a[2], 'f32')}, {to[1]})")
    if to == "f16x2" and source in ("e4m3x2", "e5m2x2"):
        return f.assign(a[0], "b32", f"fp8x2_to_f16x2({f.value(a[1], 'b16')}, {source[1]})")
    if to == "tf32" and source == "f32" and "rna" in p:
        return f.assign(a[0], "b32", f"to_tf32({f.value(a[1], 'f32')})")
    if "pack" in p or "x2" in to or "x2" in source or "tf32" in (to, source):
        raise UnsupportedError(".".join(p))
    if is_half(to) and source == "f32":
        return f.assign(a[0], "b16", f"to_half_bits<{bf16(to)}>({f.value(a[1], 'f32')})")
    if is_half(source):
        value = f"half_value<{bf16(source)}>({f.value(a[1], 'b16')})"
        if to in ("f32", "f64"):
            return f.assign(a[0], to, value)
        if is_half(to):
            return f.assign(a[0], "b16", f"to_half_bits<{bf16(to)}>({value})")
        return f.assign(a[0], to, f"float_to_integer<{C_TYPES[to]}>({value}, '{rounding}')")
    if source[0] == "f":
        value = f.value(a[1], source)
        if to[0] != "f":
            return f.assign(a[0], to, f"float_to_integer<{C_TYPES[to]}>({value}, '{rounding}')")
        if rounding:
            value = f"({C_TYPES[to]})round_as({value}, '{rounding}')"
        if "sat" in p:
            value = f"std::fmin(std::fmax({value}, 0.0f), 1.0f)"
        value = f"({C_TYPES[to]})({value})"
        return f.assign(a[0], to, f"ftz({value})" if "ftz" in p and to == "f32" else value)
    if is_half(to):
        return f.assign(a[0], "b16", f"to_half_bits<{bf16(to)}>((float){f.value(a[1], source)})")
    if to[0] == "f":
        return f.assign(a[0], to, f"({C_TYPES[to]}){f.value(a[1], source)}")
    cast = f"({C_TYPES[source]}){f.value(a[1], source)}"
    expression = f"saturate<{C_TYPES[to]}>({cast})" if "sat" in p else f"({C_TYPES[to]}){cast}"
    variable, have = f.register(a[0])
    if have in ("f32", "f64"):
        return f.assign(a[0], to, expression)
    return f"{variable} = ({C_TYPES[have]})({expression});"  # a wider register is sign- or zero-extended


@handles("mov")
def move(f: Function, p: list[str], a: list[str]) -> str:
    kind = p[-1]
    targets, sources = f.elements(a[0]), f.elements(a[1])
    if len(targets) > 1:
        width = SIZES[kind] * 8 // len(targets)
        whole = f"const uint{SIZES[kind] * 8}_t whole_ = {f.value(a[1], f'b{SIZES[kind] * 8}')};"
        parts = [f.assign(t, f"b{width}", f"(uint{width}_t)(whole_ >> {i * width})") for i, t in enumerate(targets)]
        return f"{{ {whole} {' '.join(parts)} }}"
    if len(sources) > 1:
        width, whole = SIZES[kind] * 8 // len(sources), f"uint{SIZES[kind] * 8}_t"
        parts = [f"(({whole}){f.value(s, f'b{width}')} << {i * width})" for i, s in enumerate(sources)]
        return f.assign(a[0], f"b{SIZES[kind] * 8}", " | ".join(parts))
    return f.assign(a[0], kind, f.value(a[1], kind))
