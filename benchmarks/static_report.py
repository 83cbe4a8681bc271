"""Static figures of every CUDA kernel, for machines without a GPU: `python -m benchmarks.static_report`.

Compiles csrc/**/*_cuda.cu and *_sm90.cu to cubins and reads them with the cuobjdump of Triton's wheel: registers,
stack, shared memory, instruction mix of the kernel and of its innermost loops, widths of memory instructions, and
occupancy at the launch shapes of tests/budgets.json. Prints a table, writes a plot (--plot FILE). Nothing is run.
tests/test_static_budgets.py holds each kernel to its budget.
"""

from __future__ import annotations

import argparse
import collections
import importlib.util
import json
import re
import subprocess
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
BUDGETS = ROOT / "tests" / "budgets.json"
ARCHS = ("80", "86", "89", "90", "90a", "100", "120")


@dataclass(frozen=True)
class Multiprocessor:
    """Limits of one SM (CUDA C++ programming guide, table of compute capabilities); shared memory in bytes."""

    shared: int
    shared_per_block: int
    warps: int
    blocks: int
    registers: int = 65536


_SM = {
    80: Multiprocessor(164 << 10, 163 << 10, 64, 32),
    86: Multiprocessor(100 << 10, 99 << 10, 48, 16),
    89: Multiprocessor(100 << 10, 99 << 10, 48, 24),
    90: Multiprocessor(228 << 10, 227 << 10, 64, 32),
    100: Multiprocessor(228 << 10, 227 << 10, 64, 32),
    120: Multiprocessor(100 << 10, 99 << 10, 48, 24),
}
_RESERVED = 1024  # bytes of shared memory that the system takes from each block

# First match wins. Widths are kept where a narrow access would be a fault of the kernel.
_CLASSES = [(name, re.compile(pattern)) for name, pattern in [
    ("MMA", r"HMMA|IMMA|HGMMA|WGMMA"), ("LDSM", r"LDSM"), ("TMA", r"UTMALDG"),
    ("LDGSTS.128", r"LDGSTS\S*\.128"), ("LDGSTS", r"LDGSTS"),
    ("LDG.128", r"LDG\S*\.128"), ("LDG.64", r"LDG\S*\.64"), ("LDG", r"LDG|LD\.E"), ("STG.128", r"STG\S*\.128"),
    ("STG", r"STG|ST\.E"), ("LDS.128", r"LDS\S*\.128"), ("LDS.64", r"LDS\S*\.64"), ("LDS", r"LDS"), ("STS", r"STS"),
    ("LDL", r"LDL"), ("STL", r"STL"), ("LDC", r"LDC|ULDC|LDCU"), ("SHFL", r"SHFL"), ("BAR", r"BAR|SYNCS"),
    ("MUFU", r"MUFU"), ("ATOM", r"ATOM|RED\b|RED\.|REDUX"), ("FP32", r"FADD|FMUL|FFMA|FMNMX|FSEL|FSETP|FCHK"),
    ("CVT", r"F2F|F2I|I2F|F2FP|I2FP"), ("FP64", r"D(ADD|MUL|FMA|SETP|MNMX)"),
    ("BRANCH", r"BRA|EXIT|CALL|RET|JMP|BRX|NOP|WARPSYNC|BSYNC|BSSY|DEPBAR|ERRBAR|MEMBAR|LDGDEPBAR|CCTL|YIELD"),
    ("INT", r"."),
]]  # fmt: skip


@dataclass
class Loop:
    start: int
    end: int
    mix: dict[str, int]


@dataclass
class Kernel:
    """What one cubin says of one kernel. `name` is demangled, without namespace and arguments."""

    name: str
    arch: str
    registers: int
    stack: int
    static_shared: int
    mix: dict[str, int] = field(default_factory=dict)
    loops: list[Loop] = field(default_factory=list)
    step: dict[str, int] = field(default_factory=dict)  # see _read_step; empty for kernels without mma.sync

    @property
    def spills(self) -> int:
        """Loads and stores of local memory."""
        return self.mix.get("LDL", 0) + self.mix.get("STL", 0)

    @property
    def main_loop(self) -> Loop | None:
        """The innermost loop with most instructions."""
        inner = [
            a for a in self.loops if not any(b is not a and a.start <= b.start and b.end <= a.end for b in self.loops)
        ]
        return max(inner, key=lambda loop: loop.end - loop.start, default=None)

    def occupancy(self, threads: int, dynamic_shared: int | dict[str, int]) -> tuple[int, str]:
        """(blocks an SM, what limits them), as NVIDIA's occupancy calculator counts. (0, "absent") where the bytes of
        shared memory are given by architecture and not for this one: the variant does not fit there."""
        sm = _SM[int(self.arch.rstrip("a"))]
        if isinstance(dynamic_shared, dict):
            here = dynamic_shared.get(self.arch, dynamic_shared.get(self.arch + "a"))
            if here is None:
                return 0, "absent"
            dynamic_shared = here
        warps, shared = -(-threads // 32), self.static_shared + dynamic_shared
        if shared > sm.shared_per_block:
            return 0, "shared memory of a block"
        per_warp = -(-self.registers * 32 // 256) * 256  # registers are given out 256 at a time, per quarter of the SM
        limits = {
            "warps": sm.warps // warps,
            "blocks": sm.blocks,
            "registers": sm.registers // 4 // per_warp * 4 // warps,
            "shared memory": sm.shared // (-(-(shared + _RESERVED) // 128) * 128),
        }
        limit = min(limits, key=lambda name: limits[name])
        return limits[limit], limit


def tools() -> Path | None:
    """Folder of cuobjdump (it comes with Triton's wheel), or None."""
    spec = importlib.util.find_spec("triton")
    if spec is None or spec.origin is None:
        return None
    folder = Path(spec.origin).parent / "backends" / "nvidia" / "bin"
    return folder if (folder / "cuobjdump").exists() else None


def _run(*command: str | Path) -> str:
    return subprocess.run([str(part) for part in command], capture_output=True, text=True, check=True).stdout


def _short_names(mangled: list[str]) -> dict[str, str]:
    text = _run("c++filt", *mangled).splitlines() if mangled else []
    names = {}
    for symbol, name in zip(mangled, text):
        name = re.sub(r"\((?:int|bool|long)\)", "", name.replace("specdec::", "")).removeprefix("void ")
        names[symbol] = re.sub(r"\(.*", "", name)
    return names


def built_library() -> Path | None:
    """The CUDA ops library as built here, if it is newer than every source of it."""
    found = sorted((ROOT / "specdec_kernels").glob("_cuda.*.so"))
    sources = [*(ROOT / "csrc").rglob("*.cu*"), *(ROOT / "csrc").rglob("*.h"), ROOT / "setup.py"]
    newest = max(path.stat().st_mtime for path in sources)
    return found[0] if found and found[0].stat().st_mtime > newest else None


def read_cubin(path: Path, arch: str) -> list[Kernel]:
    """Every kernel of a cubin, or of a library's part for this architecture."""
    folder = tools()
    assert folder is not None
    usage = re.findall(
        r"Function (\S+):\s+REG:(\d+) STACK:(\d+) SHARED:(\d+)",
        _run(folder / "cuobjdump", "-arch", f"sm_{arch}", "-res-usage", path),
    )
    names = _short_names([found[0] for found in usage])
    reserved = _RESERVED if int(arch.rstrip("a")) >= 90 else 0  # counted as static shared memory from sm_90 on
    kernels = {
        symbol: Kernel(names[symbol], arch, int(registers), int(stack), max(0, int(shared) - reserved))
        for symbol, registers, stack, shared in usage
    }
    for part in re.split(r"\n\s*Function : ", _run(folder / "cuobjdump", "-arch", f"sm_{arch}", "-sass", path))[1:]:
        symbol = part.split()[0]
        if symbol in kernels:
            _read_instructions(kernels[symbol], part)
    return list(kernels.values())


def _read_instructions(kernel: Kernel, listing: str) -> None:
    pattern = r"/\*([0-9a-f]{4,})\*/\s+(?:@!?U?P\w+\s+)?([A-Z][\w.]*)([^;]*);"
    instructions = [
        (int(at, 16), name, rest)
        for at, name, rest in re.findall(pattern, listing)
        if not (name.startswith("LDS") and "RZ, [RZ]" in rest)  # ptxas pads LDGSTS with these
    ]

    def mix(low: int, high: int) -> dict[str, int]:
        inside = (name for at, name, _ in instructions if low <= at <= high)
        return dict(collections.Counter(next(c for c, p in _CLASSES if p.match(name)) for name in inside))

    kernel.mix = mix(0, 1 << 60)
    kernel.step = _read_step(kernel.name, [at for at, name, _ in instructions if name.startswith("HMMA")], mix)
    for at, name, rest in instructions:
        target = re.search(r"0x([0-9a-f]+)", rest) if name.startswith("BRA") else None
        if target and int(target[1], 16) < at:
            kernel.loops.append(Loop(int(target[1], 16), at, mix(int(target[1], 16), at)))


def step_copies(products: list[int], masked_steps: int = 1) -> tuple[list[int], list[int]]:
    """Places of mma instructions, parted into the two copies of attention's tile step, masked and not. The masked copy
    may hold several steps, which stand close together; other code lies between the copies."""
    one = len(products) // (1 + masked_steps)
    cut = max(one, len(products) - one, key=lambda i: products[i] - products[i - 1])
    return products[:cut], products[cut:]


def _read_step(name: str, products: list[int], mix: Callable[[int, int], dict[str, int]]) -> dict[str, int]:
    """The mix from the first to the last product of a tile step on context tiles, the shorter copy of the two."""
    masked_steps = 2 if name.endswith(", 256, 256, 64>") else 1  # attention_step.cuh, attend_tile
    if not products or len(products) % (1 + masked_steps):
        return {}
    parts = [mix(part[0], part[-1]) for part in step_copies(products, masked_steps)]
    return min(parts, key=lambda m: sum(m.values()))


def build_cubin(source: Path, arch: str, few: bool = False) -> Path:
    """Compile one CUDA file for one architecture (up-to-date files are kept)."""
    sys.path.insert(0, str(ROOT))
    from tests.cuda_on_cpu import build

    compiler = build.nvcc()
    if compiler is None:
        raise build.BuildError("static figures need nvcc")
    target = build.BUILD / "cubin" / f"sm_{arch}{'_few' if few else ''}" / f"{source.stem}.cubin"
    includes = [f"-I{ROOT / 'csrc'}", *(flag.replace("-isystem", "-I") for flag in build.torch_flags()[0])]
    command = [compiler, "-std=c++20", "-O3", "-lineinfo", "-cubin", f"-arch=sm_{arch}", "-DUSE_CUDA=1"]
    command += ["-DSPECDEC_FEW_INSTANCES"] if few else []
    return build.make(target, [*command, *includes, "-o", str(target), str(source)], depfile=True)


def report(archs: tuple[str, ...] = ARCHS, few: bool = False, only: Sequence[str] = ()) -> list[Kernel]:
    """Figures of every kernel for every architecture. `few`: the instances that CI compiles; `only`: files by stem."""
    from tests.cuda_on_cpu import build

    sources = {path.stem: path for path in build.cuda_sources()}
    if unknown := sorted(set(only) - set(sources)):
        raise ValueError(f"static_report: file: expected any of {sorted(sources)}, got {unknown}")
    wanted = [path for stem, path in sources.items() if not only or stem in only]
    tasks = [(s, arch) for s in wanted for arch in archs if build.arch_of(s, arch) == arch]
    cubins = build.parallel([lambda s=source, a=arch: build_cubin(s, a, few) for source, arch in tasks])
    return [kernel for (_, arch), cubin in zip(tasks, cubins) for kernel in read_cubin(cubin, arch)]


def budgets() -> dict[str, dict[str, Any]]:
    """Budget of each kernel by name; a key ending in `<` covers all instances of a template."""
    return json.loads(BUDGETS.read_text())["kernels"]


def budget_of(name: str, table: dict[str, dict[str, Any]]) -> dict[str, Any] | None:
    """The entry for a kernel: its full name, else the longest `template<` prefix."""
    prefixes = [key for key in table if key == name or (key.endswith("<") and name.startswith(key))]
    return table[max(prefixes, key=len)] if prefixes else None


def line(kernel: Kernel, budget: dict[str, Any] | None) -> str:
    inner = kernel.step or (kernel.main_loop.mix if kernel.main_loop else {})
    mix = ", ".join(f"{name} {count}" for name, count in sorted(inner.items(), key=lambda i: -i[1])[:7]) or "-"
    blocks, limit = kernel.occupancy(budget["threads"], budget["dynamic_shared"]) if budget else ("?", "no budget yet")
    return (f"| `{kernel.name}` | sm_{kernel.arch} | {kernel.registers} | {kernel.spills} | {kernel.static_shared} | "
            f"{blocks} ({limit}) | {mix} |")  # fmt: skip


def plot(kernels: list[Kernel], path: Path) -> None:
    """Registers of every kernel by architecture."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    names = sorted({kernel.name for kernel in kernels})
    figure, axes = pyplot.subplots(figsize=(9, 1 + 0.4 * len(names)))
    for arch in sorted({kernel.arch for kernel in kernels}):
        mine = [kernel for kernel in kernels if kernel.arch == arch]
        axes.plot([k.registers for k in mine], [names.index(k.name) for k in mine], "o", label=f"sm_{arch}", alpha=0.7)
    axes.set_yticks(range(len(names)), names, fontsize=7)
    axes.set_xlabel("registers a thread (255 is the limit; no kernel may spill)")
    axes.axvline(255, color="grey", linewidth=0.5)
    axes.legend(fontsize=7)
    figure.tight_layout()
    figure.savefig(path, dpi=120)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("files", nargs="*", metavar="file", help="CUDA files by stem, as tree_cuda (default: all)")
    parser.add_argument("--archs", default=",".join(ARCHS))
    parser.add_argument("--few", action="store_true", help="only the instances that CI compiles")
    parser.add_argument("--plot", type=Path, help="write a plot of registers here")
    options = parser.parse_args()
    if tools() is None:
        sys.exit("static_report: cuobjdump: expected Triton's wheel (it carries the tool), got none")
    kernels = report(tuple(options.archs.split(",")), options.few, options.files)
    table = budgets()
    columns = ["kernel", "arch", "registers", "spills", "static shared", "blocks an SM", "main loop or tile step"]
    print("| " + " | ".join(columns) + " |\n" + "|---" * len(columns) + "|")
    for kernel in sorted(kernels, key=lambda k: (k.name, k.arch)):
        print(line(kernel, budget_of(kernel.name, table)))
    if options.plot:
        plot(kernels, options.plot)


if __name__ == "__main__":
    main()
