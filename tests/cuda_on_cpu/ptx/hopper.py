"""Handlers of Hopper's asynchronous instructions: mbarrier, bulk copies, wgmma, setmaxnreg."""

from __future__ import annotations

import re

from tests.cuda_on_cpu.ptx.arithmetic import handles
from tests.cuda_on_cpu.ptx.function import Function
from tests.cuda_on_cpu.ptx.parser import UnsupportedError


def _at(f: Function, kind: str) -> str:
    return f"at_site({f.site(kind)})"


def _shared(f: Function, operand: str) -> str:
    return f"(char*)dynamic_shared() + {f.address(operand, 'shared')}"


@handles("mbarrier")
def mbarrier(f: Function, p: list[str], a: list[str]) -> str:
    if "shared" not in p or "noComplete" in p or "cluster" in p:
        raise UnsupportedError(".".join(p))
    action = p[1]
    if action == "init":
        return f"mbarrier_init({_shared(f, a[0])}, {f.value(a[1], 'u32')}, {_at(f, 'mbarrier init')});"
    if action == "inval":
        return ";"
    if action == "expect_tx":
        return f"mbarrier_expect({_shared(f, a[0])}, {f.value(a[1], 'u32')}, {_at(f, 'mbarrier expect')});"
    if action == "arrive":
        if a[0] != "_":
            raise UnsupportedError(f"{'.'.join(p)} with a state")
        number = f.value(a[2], "u32") if len(a) > 2 else "1"
        counts = f"1, {number}" if "expect_tx" in p else f"{number}, 0"
        return f"mbarrier_arrive({_shared(f, a[1])}, {counts}, {_at(f, 'mbarrier arrive')});"
    if action in ("try_wait", "test_wait") and "parity" in p:
        blocks = str(action == "try_wait").lower()
        test = f"mbarrier_test({_shared(f, a[1])}, {f.value(a[2], 'u32')}, {blocks}, {_at(f, 'mbarrier wait')})"
        return f.assign(a[0], "pred", test)
    raise UnsupportedError(".".join(p))


def bulk_copy(f: Function, p: list[str], a: list[str]) -> str:
    """cp.async.bulk from global to shared memory: bytes, or the box of a tensor map."""
    if p[3] == "tensor":
        match = re.match(r"\[\s*(\S+)\s*,\s*(\{.*\})\s*\]$", a[1])
        if p[5:] != ["shared", "global", "mbarrier__complete_tx__bytes"] or not match or len(a) != 3:
            raise UnsupportedError(".".join(p))
        first = f.elements(match[2])
        if p[4] != f"{len(first)}d":
            raise UnsupportedError(f"{'.'.join(p)} with {len(first)} coordinates")
        return (f"{{ const int32_t c_[] = {{{', '.join(f.value(c, 's32') for c in first)}}}; tensor_copy("
                f"{_shared(f, a[0])}, (const void*){f.value(match[1], 'u64')}, {len(first)}, c_, {_shared(f, a[2])}, "
                f"{_at(f, 'tensor copy')}); }}")  # fmt: skip
    if p[3:] != ["shared", "global", "mbarrier__complete_tx__bytes"]:
        raise UnsupportedError(".".join(p))
    return (f"bulk_copy({_shared(f, a[0])}, {f.address(a[1], 'global')}, {f.value(a[2], 'u32')}, {_shared(f, a[3])}, "
            f"{_at(f, 'bulk copy')});")  # fmt: skip


def arrive_after_copies(f: Function, p: list[str], a: list[str]) -> str:
    if "noinc" not in p:
        raise UnsupportedError(".".join(p))
    return f"mbarrier_arrive_after_copies({_shared(f, a[0])}, {_at(f, 'mbarrier arrive')});"


@handles("wgmma")
def wgmma(f: Function, p: list[str], a: list[str]) -> str:
    if p[1] == "fence":
        return "wgmma_fence();"
    if p[1] == "commit_group":
        return "wgmma_commit();"
    if p[1] == "wait_group":
        return f"wgmma_wait({a[0]}, {_at(f, 'wgmma wait')});"
    shape = re.match(r"m64n(\d+)k16$", p[4])
    if p[1] != "mma_async" or not shape or p[5] != "f32" or p[6] != p[7] or p[6] not in ("bf16", "f16"):
        raise UnsupportedError(".".join(p))
    accumulators, registers = f.elements(a[0]), f.elements(a[1])
    in_registers = len(registers) > 1
    transposes = ["0", *a[6:]] if in_registers else a[6:]
    flags = [f.value(a[3], "pred"), *(str(t == "1").lower() for t in transposes)]
    source = f"const uint32_t a_[4] = {{{f.values(a[1], 'b32')}}};" if in_registers else ""
    matrix = "0" if in_registers else f.value(a[1], "b64")
    site = f.site("wgmma")
    # Accumulators are computed at once: nvcc moves them between registers that ptxas will make one.
    call = (f"wgmma({{d_, {'a_' if in_registers else 'nullptr'}, {matrix}, {f.value(a[2], 'b64')}, {shape[1]}, {a[4]}, "
            f"{a[5]}, Element::{p[6]}, {', '.join(flags)}, false}}, at_site({site}), &{site});")  # fmt: skip
    writes = "".join(f.assign(one, "f32", f"d_[{i}]") for i, one in enumerate(accumulators))
    return f"{{ float d_[] = {{{f.values(a[0], 'f32')}}}; {source} {call} {writes} }}"


@handles("setmaxnreg")
def registers(f: Function, p: list[str], a: list[str]) -> str:
    return f"set_max_registers({a[0]}, {_at(f, 'setmaxnreg')});"
