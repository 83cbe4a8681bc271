"""Handlers of PTX memory, control, warp and tensor-core instructions."""

from __future__ import annotations

import re

from tests.cuda_on_cpu.ptx import hopper
from tests.cuda_on_cpu.ptx.arithmetic import handles
from tests.cuda_on_cpu.ptx.function import C_TYPES, Function
from tests.cuda_on_cpu.ptx.parser import SIZES, UnsupportedError

_SPACES = ("global", "shared", "param", "local", "const")


def space_of(p: list[str]) -> str:
    return next((x.split("::")[0] for x in p[1:] if x.split("::")[0] in _SPACES), "generic")


def order_of(p: list[str]) -> str:
    """C++ name of the memory order; "" for a weak access."""
    for name in ("acq_rel", "acquire", "release", "relaxed"):
        if name in p:
            return f"Order::{name}"
    return "Order::relaxed" if "volatile" in p else ""


def _pointer(f: Function, operand: str, space: str, size: int, site: str) -> str:
    if space == "shared":
        return f"shared_pointer<{size}>({f.address(operand, space)}, {site})"
    return f.address(operand, space)


@handles("ld", "ldu")
def load(f: Function, p: list[str], a: list[str]) -> str:
    kind, space, targets = p[-1], space_of(p), f.elements(a[0])
    size = SIZES[kind] * len(targets)
    operand = a[1].split("]")[0] + "]"
    if space == "param" and "%" not in operand and not any(name in operand for name in f.parameters):
        return "".join(f.assign(t, kind, "0") for t in targets)  # the result of an ignored call
    if space in ("param", "local"):
        source = f"(const char*){f.address(operand, space)}"
    else:
        site = f.site("shared load" if space == "shared" else "global load", size)
        order = order_of(p)
        call, extra = (f"load_ordered<{size}>", f"{order}, ") if order else (f"load<{size}>", "")
        source = f"{call}({_pointer(f, operand, space, size, site)}, {extra}{site})"
    width, c_type = SIZES[kind], C_TYPES[kind]
    reads = [f"{c_type} v{i}_; memcpy(&v{i}_, m_ + {i * width}, {width});" for i in range(len(targets))]
    writes = [f.assign(t, kind, f"v{i}_") for i, t in enumerate(targets)]
    extended = [_extend(f, t, kind, f"v{i}_") or w for i, (t, w) in enumerate(zip(targets, writes))]
    return f"{{ const auto* m_ = {source}; {' '.join(reads)} {' '.join(extended)} }}"


def _extend(f: Function, target: str, kind: str, expression: str) -> str | None:
    """A signed load into a wider register extends the sign."""
    if kind[0] != "s" or target == "_":
        return None
    variable, have = f.register(target)
    return f"{variable} = ({C_TYPES[have]})(int64_t)({expression});" if have not in ("f32", "f64") else None


@handles("st")
def store(f: Function, p: list[str], a: list[str]) -> str:
    kind, space, sources = p[-1], space_of(p), f.elements(a[1])
    width, c_type = SIZES[kind], C_TYPES[kind]
    size = width * len(sources)
    operand = a[0].split("]")[0] + "]"
    if space == "param":
        return ";"  # an argument of an ignored call
    fill = [
        f"{{ {c_type} v_ = {f.value(s, kind)}; memcpy(b_ + {i * width}, &v_, {width}); }}"
        for i, s in enumerate(sources)
    ]
    buffer = f"alignas(16) char b_[{size}]; {' '.join(fill)}"
    if space == "local":
        return f"{{ {buffer} memcpy({f.address(operand, space)}, b_, {size}); }}"
    site = f.site("shared store" if space == "shared" else "global store", size)
    pointer, order = _pointer(f, operand, space, size, site), order_of(p)
    if order:
        return f"{{ {buffer} store_ordered<{size}>({pointer}, b_, {order}, {site}); }}"
    return f"{{ {buffer} store<{size}>({pointer}, b_, {site}); }}"


_UPDATES = {"add": "T(old + v_)", "min": "std::min(old, v_)", "max": "std::max(old, v_)", "exch": "v_",
            "and": "T(old & v_)", "or": "T(old | v_)", "xor": "T(old ^ v_)", "cas": "old == v_ ? w_ : old",
            "inc": "old >= v_ ? T(0) : T(old + 1)", "dec": "old == 0 || old > v_ ? v_ : T(old - 1)"}  # fmt: skip


@handles("atom", "red")
def atomic(f: Function, p: list[str], a: list[str]) -> str:
    kind, space = p[-1], space_of(p)
    name = next((x for x in p[1:] if x in _UPDATES), "")
    if not name or kind in ("f16", "bf16", "f16x2", "bf16x2") or a[0].startswith("{"):
        raise UnsupportedError(".".join(p))
    memory, operands = (a[1], a[2:]) if p[0] == "atom" else (a[0], a[1:])
    kind = "u" + kind[1:] if kind[0] == "b" else kind
    site = f.site("atomic", SIZES[kind])
    second = f"[[maybe_unused]] const T w_ = {f.value(operands[1], kind)};" if name == "cas" else ""
    capture = "[v_, w_]" if name == "cas" else "[v_]"
    call = (f"atomic<T>({_pointer(f, memory, space, SIZES[kind], site)}, {order_of(p) or 'Order::relaxed'}, {site}, "
            f"{capture}(T old) -> T {{ return {_UPDATES[name]}; }})")  # fmt: skip
    result = f.assign(a[0], kind, call) if p[0] == "atom" else f"(void){call};"
    return f"{{ using T = {C_TYPES[kind]}; const T v_ = {f.value(operands[0], kind)}; {second} {result} }}"


@handles("cvta")
def convert_address(f: Function, p: list[str], a: list[str]) -> str:
    if space_of(p) != "shared":
        return f.assign(a[0], "u64", f.value(a[1], "u64"))
    base = "(uint64_t)dynamic_shared()"
    sign = "-" if "to" in p else "+"
    return f.assign(a[0], "u64", f"(uint64_t)({f.value(a[1], 'u64')} {sign} {base})")


@handles("isspacep")
def is_space(f: Function, p: list[str], a: list[str]) -> str:
    raise UnsupportedError(".".join(p))


@handles("cp")
def copy_async(f: Function, p: list[str], a: list[str]) -> str:
    if p[1:3] == ["async", "commit_group"]:
        return "cp_async_commit();"
    if p[1:3] == ["async", "wait_group"]:
        return f"cp_async_wait({a[0]}, false);"
    if p[1:3] == ["async", "wait_all"]:
        return "cp_async_wait(0, true);"
    if p[1:3] == ["async", "bulk"]:
        return hopper.bulk_copy(f, p, a)
    if p[1:4] == ["async", "mbarrier", "arrive"]:
        return hopper.arrive_after_copies(f, p, a)
    if p[1] != "async" or p[2] not in ("ca", "cg"):
        raise UnsupportedError(".".join(p))
    site = f.site("cp.async", int(a[2], 0))
    size = f.value(a[3], "u32") if len(a) > 3 else f"{a[2]}u"
    target = f"shared_pointer<{int(a[2], 0)}>({f.address(a[0], 'shared')}, {site})"
    return f"copy_async({target}, {f.address(a[1], 'global')}, {a[2]}, {size}, {site});"


# ---- warps
def _at(f: Function, kind: str) -> str:
    return f"at_site({f.site(kind)})"


@handles("shfl")
def shuffle(f: Function, p: list[str], a: list[str]) -> str:
    targets = a[0].split("|")
    operands = f"{f.value(a[1], 'b32')}, {f.value(a[2], 'u32')}, {f.value(a[3], 'u32')}, {f.value(a[4], 'u32')}"
    valid = f.assign(targets[1], "pred", "p_") if len(targets) > 1 else ""
    call = f"shuffle_sync({operands}, '{p[2][0]}', p_, {_at(f, 'shfl')})"
    return f"{{ bool p_; const uint32_t r_ = {call}; {f.assign(targets[0], 'b32', 'r_')} {valid} }}"


@handles("vote")
def vote(f: Function, p: list[str], a: list[str]) -> str:
    mask = f.value(a[2], "u32")
    votes = f"ballot({mask}, {f.value(a[1], 'pred')}, {_at(f, 'vote')})"
    if "ballot" in p:
        return f.assign(a[0], "b32", votes)
    if "uni" in p:
        raise UnsupportedError(".".join(p))
    return f.assign(a[0], "pred", f"{votes} != 0" if "any" in p else f"{votes} == {mask}")


@handles("redux")
def reduce(f: Function, p: list[str], a: list[str]) -> str:
    if p[-1] == "f32":
        raise UnsupportedError(".".join(p))
    operation = p[2].capitalize()
    return f.assign(
        a[0], p[-1], f"warp_reduce({f.value(a[2], 'u32')}, {f.value(a[1], p[-1])}, {operation}{{}}, {_at(f, 'redux')})"
    )


@handles("match")
def match(f: Function, p: list[str], a: list[str]) -> str:
    if p[1] != "any":
        raise UnsupportedError(".".join(p))
    return f.assign(a[0], "b32", f"match_any({f.value(a[2], 'u32')}, {f.value(a[1], p[-1])}, {_at(f, 'match')})")


@handles("activemask")
def active_mask(f: Function, p: list[str], a: list[str]) -> str:
    return f.assign(a[0], "b32", "__activemask()")


@handles("bar", "barrier")
def barrier(f: Function, p: list[str], a: list[str]) -> str:
    if "warp" in p:
        return f"sync_warp({f.value(a[0], 'u32')}, {_at(f, 'syncwarp')});"
    if "red" in p:
        kind = {"popc": 0, "and": 1, "or": 2}[p[p.index("red") + 1]]
        predicate = f.value(a[-1], "pred")
        if a[1:-1] != ["0"]:
            raise UnsupportedError(f"{'.'.join(p)} {', '.join(a)}")
        return f.assign(a[0], p[-1], f"barrier_reduce({kind}, {predicate}, {_at(f, 'barrier')})")
    count = f"(int){f.value(a[1], 'u32')}" if len(a) > 1 else "0"
    waits = str("arrive" not in p).lower()
    return f"::emulated::barrier((int){f.value(a[0], 'u32')}, {count}, {waits}, {_at(f, 'barrier')});"


@handles("membar", "fence")
def fence(f: Function, p: list[str], a: list[str]) -> str:
    if "mbarrier_init" in p:
        return ";"  # inits are visible at once here
    if "proxy" in p:
        if p[1:3] != ["proxy", "async"]:
            raise UnsupportedError(".".join(p))
        return "fence_async_proxy();"
    return ";" if "cta" in p else "fence();"


# ---- tensor cores
@handles("ldmatrix")
def ldmatrix(f: Function, p: list[str], a: list[str]) -> str:
    targets, site = f.elements(a[0]), f.site("ldmatrix", 16)
    if "b16" not in p or "m8n8" not in p:
        raise UnsupportedError(".".join(p))
    transpose = str("trans" in p).lower()
    row = f"(char*)dynamic_shared() + {f.address(a[1], 'shared')}"
    writes = "".join(f.assign(t, "b32", f"r_[{i}]") for i, t in enumerate(targets))
    call = f"::emulated::ldmatrix(r_, {row}, {len(targets)}, {transpose}, at_site({site}), &{site});"
    return f"{{ uint32_t r_[4]; {call} {writes} }}"


_MMA = {("m16n8k16", "bf16"): 16, ("m16n8k16", "f16"): 16, ("m16n8k8", "f16"): 8, ("m16n8k8", "tf32"): 8}


@handles("mma")
def mma(f: Function, p: list[str], a: list[str]) -> str:
    shape = next((x for x in p if re.match(r"m\d+n\d+k\d+$", x)), "")
    kinds = p[p.index("col") + 1 :]
    k = _MMA.get((shape, kinds[1]), 0)
    if not k or kinds[0] != "f32" or kinds[-1] != "f32" or kinds[1] != kinds[2]:
        raise UnsupportedError(".".join(p))
    writes = "".join(f.assign(t, "f32", f"d_[{i}]") for i, t in enumerate(f.elements(a[0])))
    return (f"{{ float d_[4]; const uint32_t a_[] = {{{f.values(a[1], 'b32')}}}, b_[] = {{{f.values(a[2], 'b32')}}}; "
            f"const float c_[4] = {{{f.values(a[3], 'f32')}}}; "
            f"mma_m16n8(d_, a_, b_, c_, {k}, Element::{kinds[1]}, {_at(f, 'mma')}); {writes} }}")  # fmt: skip


# ---- control
@handles("bra")
def branch(f: Function, p: list[str], a: list[str]) -> str:
    return f"goto {re.sub(chr(92) + 'W', '_', a[0])};"


@handles("ret", "exit")
def leave(f: Function, p: list[str], a: list[str]) -> str:
    return "return;"


@handles("trap", "brkpt")
def trap(f: Function, p: list[str], a: list[str]) -> str:
    return f'trap("trap", {_at(f, "trap")});'


@handles("nanosleep")
def sleep(f: Function, p: list[str], a: list[str]) -> str:
    return "yield();"


@handles("prefetch", "prefetchu", "discard", "pmevent", "griddepcontrol", "createpolicy", "applypriority")
def hint(f: Function, p: list[str], a: list[str]) -> str:
    if p[0] == "createpolicy":
        return f.assign(a[0], "b64", "0ull")
    return ";"


@handles("call")
def call(f: Function, p: list[str], a: list[str]) -> str:
    text = ", ".join(a)
    if "vprintf" in text:
        return ";"  # device printf: ignored
    if "__assertfail" in text:
        return f'trap("device assert", {_at(f, "assert")});'
    raise UnsupportedError(f"{'.'.join(p)} {text}")
