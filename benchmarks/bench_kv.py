"""Committing KV on this machine: `python -m benchmarks.bench_kv [--quick] [--out FILE]`.

commit_kv against a C loop of memcpy over the same scattered rows (compiled here, same threads, pointers computed
beforehand) and against torch indexing with index tensors made beforehand; a dense path against a moved one; copy_pages.
"""

from __future__ import annotations

import argparse
import ctypes
import subprocess
import sys
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

import specdec_kernels as sk
from benchmarks.harness import Bench, add_options

MEMCPY = """
#include <stdint.h>
#include <string.h>
void copy_rows(int64_t count, char **target, char **source, int64_t bytes, int threads) {
#pragma omp parallel for num_threads(threads) schedule(static)
  for (int64_t i = 0; i < count; i++) memcpy(target[i], source[i], bytes);
}
"""


def c_loop() -> Callable[..., Any]:
    """The C loop, compiled with the system's compiler."""
    folder = Path(tempfile.mkdtemp())
    (folder / "rows.c").write_text(MEMCPY)
    library = folder / "rows.so"
    subprocess.run(["gcc", "-O3", "-fopenmp", "-shared", "-fPIC", "-o", library, folder / "rows.c"], check=True)
    return ctypes.CDLL(str(library)).copy_rows


def ints(values: Any) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class Step:
    """Caches of `layers` layers and a batch whose accepted paths move `moved` rows each."""

    def __init__(self, layers: int, requests: int, moved: int, heads: int = 8, dim: int = 128, page: int = 16):
        context, nodes = 200, 16
        columns = (context + nodes + page) // page
        pages = requests * columns
        self.page = page
        self.caches = [torch.randint(-99, 99, (pages, page, heads, dim)).bfloat16() for _ in range(2 * layers)]
        generator = torch.Generator().manual_seed(2)
        self.table = torch.randperm(pages, generator=generator).int().view(requests, columns)
        self.lens = torch.randint(context - 40, context, (requests,), generator=generator).int()
        self.cu = ints([b * nodes for b in range(requests + 1)])
        path = [0] + [4 + 3 * i for i in range(moved)]  # sources and targets apart: the rivals copy in any order
        self.accepted = ints([path] * requests).view(requests, len(path))
        self.emitted = ints([len(path)] * requests)
        self.handle = sk.kv_handle(self.caches[:layers], self.caches[layers:])
        b = torch.arange(requests).repeat_interleave(moved)
        self.source, self.target = self._slots(b, path[1:]), self._slots(b, range(1, moved + 1))
        self.row_bytes = heads * dim * 2
        self.bytes = 2 * 2 * layers * len(self.source) * self.row_bytes  # read and written

    def _slots(self, b: torch.Tensor, offsets: Any) -> torch.Tensor:
        position = self.lens.long()[b] + torch.tensor(list(offsets)).repeat(len(self.lens))
        return self.table.long()[b, position // self.page] * self.page + position % self.page

    def commit(self, accepted: torch.Tensor | None = None) -> None:
        path = self.accepted if accepted is None else accepted
        sk.commit_kv(self.handle, None, self.table, self.lens, self.cu, path, self.emitted)

    def index(self) -> None:
        for cache in self.caches:
            rows = cache.view(-1, self.row_bytes // 2)
            rows[self.target] = rows[self.source]

    def pointers(self) -> tuple[Any, Any, int]:
        order = [(cache.data_ptr(), s, t) for cache in self.caches for s, t in zip(self.source, self.target)]
        array = ctypes.c_void_p * len(order)
        source = array(*(base + int(s) * self.row_bytes for base, s, _ in order))
        target = array(*(base + int(t) * self.row_bytes for base, _, t in order))
        return target, source, len(order)


def bench_commit(bench: Bench, loop: Callable[..., Any], layers: int, requests: int, moved: int) -> None:
    step = Step(layers, requests, moved)
    target, source, count = step.pointers()
    threads = torch.get_num_threads()

    def right() -> bool:
        """All three leave the caches alike."""
        before = [cache.clone() for cache in step.caches]
        results = []
        for run in (step.commit, step.index, memcpy):
            for cache, old in zip(step.caches, before):
                cache.copy_(old)
            run()
            results.append([cache.clone() for cache in step.caches])
        changed = any(not torch.equal(a, b) for a, b in zip(results[0], before))
        return changed and all(torch.equal(a, b) for other in results[1:] for a, b in zip(results[0], other))

    def memcpy() -> None:
        loop(ctypes.c_int64(count), target, source, ctypes.c_int64(step.row_bytes), threads)

    shape = {"op": "commit_kv", "layers": layers, "B": requests, "moved": moved, "Hkv": 8, "D": 128, "threads": threads}
    providers = {"memcpy loop": memcpy, "sk.commit_kv": step.commit, "torch indexing": step.index}
    bench.compare(shape, providers, right, step.bytes, base="memcpy loop")

    dense = ints([list(range(step.accepted.shape[1]))] * requests)
    before = step.caches[0].clone()

    def untouched() -> bool:
        step.commit(dense)
        return torch.equal(step.caches[0], before)

    bench.compare(
        {**shape, "op": "commit_kv dense"}, {"dense": lambda: step.commit(dense), "moved": step.commit}, untouched
    )


def bench_pages(bench: Bench, layers: int, pairs: int) -> None:
    step = Step(layers, 64, 1)
    src, dst = torch.arange(pairs).int(), (torch.arange(pairs) + pairs).int()

    def index() -> None:
        for cache in step.caches:
            cache[dst.long()] = cache[src.long()]

    def right() -> bool:
        sk.copy_pages(step.handle, None, src, dst)
        return all(torch.equal(cache[:pairs], cache[pairs : 2 * pairs]) for cache in step.caches)

    moved = 2 * len(step.caches) * pairs * step.page * step.row_bytes
    providers = {"torch indexing": index, "sk.copy_pages": lambda: sk.copy_pages(step.handle, None, src, dst)}
    bench.compare({"op": "copy_pages", "layers": layers, "pages": pairs}, providers, right, moved)


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.bench_kv")
    add_options(parser)
    options = parser.parse_args(argv)
    bench, loop = Bench("kv", options.out, rounds=8 if options.quick else 40, resume=options.resume), c_loop()
    layers = 4 if options.quick else 32
    for requests, moved in [(64, 3)] if options.quick else [(1, 3), (8, 3), (64, 1), (64, 3)]:
        bench_commit(bench, loop, layers, requests, moved)
    bench_pages(bench, layers, 16)
    return 0


if __name__ == "__main__":
    sys.exit(main())
