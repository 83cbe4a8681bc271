"""Builds attention problems as hostile as real batches and judges an op's answer against the float64 reference.

A problem owns paged caches whose dead slots hold NaN, shuffled pages, page-table columns full of ids nobody owns, mask
words with garbage behind the last slot, rows behind `cu_nodes[B]`, and strided views. Tests draw problems by seed;
`size_of(backend)` says how large they may be, so the same tests serve the CPU, a GPU and the emulated backends.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch

from python_ref import attention as ref
from tests.attention_trees import KINDS, Rng, Tree

FP8 = (torch.float8_e4m3fn, torch.float8_e5m2)
DEAD_PAGE_IDS = (2147480000, -1, 2147483647, -2147483648, 7)


@dataclass(frozen=True)
class Size:
    """Bounds of a drawn problem: the work of one problem is about sum(rows * keys) * Hq * D multiply-adds."""

    contexts: tuple[int, ...]
    max_slots: int
    batches: tuple[int, ...]
    heads: tuple[tuple[int, int], ...]
    head_dims: tuple[tuple[int, int], ...]
    work: int
    pages: tuple[int, ...] = (1, 5, 8, 16, 32, 48, 64, 128, 256)
    windows: tuple[int, ...] = (1, 63, 127, 1024)


_CONTEXTS = (0, 1, 15, 16, 17, 63, 64, 65, 127, 128, 129)
_HEADS = ((2, 2), (4, 2), (6, 2), (8, 2), (5, 1), (12, 2), (14, 2), (16, 2), (32, 2), (9, 3))
_DIMS = ((64, 64), (80, 80), (96, 96), (128, 128), (192, 128), (256, 256))
LARGE = Size((*_CONTEXTS, 1000, 1024, 8192, 32768), 156, (1, 2, 7, 8, 17, 64, 128), _HEADS, _DIMS, 2**28)
MEDIUM = Size((*_CONTEXTS, 1000, 1024), 156, (1, 2, 3, 7, 8), _HEADS, _DIMS, 2**25)
_FEW_HEADS = ((4, 2), (6, 2), (5, 1), (2, 2))
SMALL = Size((*_CONTEXTS, 200), 66, (1, 2, 3), _FEW_HEADS, ((64, 64),), 2**21, (1, 16, 64), (1, 63))


def size_of(backend: Any, long: bool = False) -> Size:
    if backend.name.split()[0] not in ("cpu", "cuda"):  # "cpu with <fault>" is as fast as the CPU op
        return SMALL
    return LARGE if long else MEDIUM


def rng_of(*seed: object) -> Rng:
    """A generator that depends on the words given and on nothing else (hash() changes from run to run)."""
    return np.random.default_rng(list(repr(seed).encode()))


def as64(tensor: torch.Tensor) -> np.ndarray:
    return tensor.detach().to("cpu", torch.float32).double().numpy()


def fill_nan(tensor: torch.Tensor) -> torch.Tensor:
    """NaN in every element; 0x7f is NaN in both float8 formats, which have no fill_."""
    if tensor.dtype in FP8:
        tensor.view(torch.uint8).fill_(0x7F)
    else:
        tensor.fill_(float("nan"))
    return tensor


def strided_cache(pages: int, middle: tuple[int, int], dim: int, style: str, dtype: torch.dtype) -> torch.Tensor:
    """A NaN cache [pages, *middle, dim]: dense, cut out of padded heads, or one half of an interleaved pair."""
    if style == "dense":
        return fill_nan(torch.empty(pages, *middle, dim, dtype=dtype))
    if style == "padded":
        whole = fill_nan(torch.empty(pages + 1, middle[0] + 2, middle[1] + 1, dim + 5, dtype=dtype))
        return whole[1:, 1:-1, :-1, 3 : dim + 3]
    assert style == "interleaved"
    return fill_nan(torch.empty(pages, 2, *middle, dim, dtype=dtype))[:, 1]


@dataclass
class Problem:
    trees: list[Tree]
    tensors: dict[str, torch.Tensor | None]
    max_nodes: int
    options: dict[str, Any] = field(default_factory=dict)  # kv_layout, softcap, window, softmax_scale
    label: str = ""

    def to(self, device: str) -> Problem:
        moved = {k: None if t is None else _keep_strides(t, device) for k, t in self.tensors.items()}
        return Problem(self.trees, moved, self.max_nodes, self.options, self.label)

    def run(self, backend: Any, **overrides: Any) -> tuple[torch.Tensor, torch.Tensor]:
        """(out, lse) of the public function."""
        from specdec_kernels.attention import tree_attention

        backend.require("tree_attention")
        arguments = {**self.to(backend.device).tensors, **self.options, **backend.kwargs, **overrides}
        positional = [arguments.pop(k) for k in POSITIONAL]
        result = tree_attention(*positional, max_nodes=self.max_nodes, return_lse=True, **arguments)
        return result[0], result[1]

    def put(self, name: str, b: int, x: torch.Tensor, first: int = 0) -> None:
        """Overwrite keys first, first + 1, .. of request b in `k_cache` or `v_cache` (x [n, Hkv, D])."""
        cache = self.tensors[name]
        rows_first = cache if self.options.get("kv_layout", "NHD") == "NHD" else cache.transpose(1, 2)
        page_size = rows_first.shape[1]
        position = torch.arange(first, first + len(x))
        pages = self.tensors["page_table"][b].cpu()[position // page_size]
        put_rows(rows_first, pages.to(cache.device), (position % page_size).to(cache.device), x.to(cache))

    def live_keys(self, b: int) -> int:
        return int(self.tensors["context_lens"][b]) + len(self.trees[b])

    # -- what each query may see, as the reference wants it

    def starts(self) -> np.ndarray:
        start = self.tensors["query_start"]
        return np.zeros(len(self.trees), dtype=np.int64) if start is None else start.cpu().numpy().astype(np.int64)

    def is_causal(self, b: int) -> bool:
        causal = self.tensors["causal"]
        return self.tensors["tree_mask"] is None or (causal is not None and bool(causal[b]))

    def visible(self) -> list[list[int]]:
        rows: list[list[int]] = []
        for b, (tree, start) in enumerate(zip(self.trees, self.starts())):
            for i in range(int(start), len(tree)):
                rows.append(list(range(i + 1)) if self.is_causal(b) else tree.visible[i])
        return rows

    def slot_positions(self) -> list[list[int]]:
        lens = self.tensors["context_lens"].tolist()
        return [
            [lens[b] + (j if self.is_causal(b) else depth) for j, depth in enumerate(tree.depths)]
            for b, tree in enumerate(self.trees)
        ]

    def reference(self) -> tuple[np.ndarray, np.ndarray]:
        t, slot_positions = self.tensors, self.slot_positions()
        query_positions = [p for row, start in zip(slot_positions, self.starts()) for p in row[int(start) :]]
        return ref.tree_attention(
            as64(t["q"]), as64(t["k_cache"]), as64(t["v_cache"]),
            t["page_table"].cpu().numpy(), t["context_lens"].cpu().numpy(), t["cu_nodes"].cpu().numpy(), self.visible(),
            query_start=self.starts(), query_positions=np.asarray(query_positions), slot_positions=slot_positions,
            **{k: None if t[k] is None else as64(t[k]) for k in ("sinks", "k_scale", "v_scale")},
            **self.options,
        )  # fmt: skip

    def yardstick(self) -> torch.Tensor:
        """torch's own attention in q's dtype: float32 scores, probabilities rounded before the product with V."""
        t, dtype = self.tensors, self.tensors["q"].dtype
        q, cu, visible = t["q"].cpu(), t["cu_nodes"].tolist(), self.visible()
        layout = self.options.get("kv_layout", "NHD")
        scale = self.options.get("softmax_scale") or q.shape[2] ** -0.5
        softcap, window = self.options.get("softcap", 0.0), self.options.get("window", -1)
        k_cache, v_cache = (
            (c if layout == "NHD" else c.transpose(1, 2)).cpu().float() for c in (t["k_cache"], t["v_cache"])
        )
        heads = k_cache.shape[2]
        group = q.shape[1] // heads
        out = torch.zeros(*q.shape[:2], v_cache.shape[3], dtype=torch.float64)
        positions = self.slot_positions()
        for b, tree in enumerate(self.trees):
            rows = cu[b + 1] - cu[b]
            length = int(t["context_lens"][b])
            keys_n = length + len(tree)
            if rows == 0 or keys_n == 0:
                continue
            pages = t["page_table"][b, : -(-keys_n // k_cache.shape[1])].cpu().long()
            k = k_cache[pages].flatten(0, 1)[:keys_n]
            v = v_cache[pages].flatten(0, 1)[:keys_n]
            k = (k * (1.0 if t["k_scale"] is None else t["k_scale"].cpu()[:, None])).to(dtype)
            v = (v * (1.0 if t["v_scale"] is None else t["v_scale"].cpu()[:, None])).to(dtype)
            seen = torch.zeros(rows, keys_n, dtype=torch.bool)
            seen[:, :length] = True
            for i in range(rows):
                seen[i, [length + j for j in visible[cu[b] + i]]] = True
            if window >= 0:
                key_positions = torch.tensor([*range(length), *positions[b]])
                seen &= key_positions[length:][int(self.starts()[b]) :, None] - key_positions[None, :] < window
            for h in range(heads):
                queries = q[cu[b] : cu[b + 1], h * group : (h + 1) * group]
                scores = scale * queries.float() @ k[:, h].float().T
                if softcap > 0:
                    scores = softcap * torch.tanh(scores / softcap)
                scores = scores.masked_fill(~seen[:, None], float("-inf"))
                if t["sinks"] is not None:
                    sink = t["sinks"].cpu().float()[h * group : (h + 1) * group]
                    scores = torch.cat([scores, sink[None, :, None].expand(rows, group, 1)], -1)
                weights = torch.softmax(scores, -1).nan_to_num(0.0)[..., :keys_n]
                result = weights.to(dtype).reshape(rows * group, -1) @ v[:, h].to(dtype)
                out[cu[b] : cu[b + 1], h * group : (h + 1) * group] = result.view(rows, group, -1).double()
        return out

    def check(self, out: torch.Tensor, lse: torch.Tensor | None = None) -> dict[str, float]:
        """Assert out and lse against float64; the allowance is torch's own error in the same dtype (FA's rule)."""
        expected, expected_lse = self.reference()
        used = int(self.tensors["cu_nodes"][-1])
        got = as64(out)
        assert np.isfinite(got).all(), f"{self.label}: out holds NaN or infinity"
        assert not got[used:].any(), f"{self.label}: rows behind cu_nodes[B] must be 0"
        error = np.abs(got - expected)[:used]
        own = np.abs(self.yardstick().numpy() - expected)[:used]
        factors = (4, 3) if self.tensors["k_cache"].dtype in FP8 else (2, 1.5)
        report = {"max": float(error.max(initial=0)), "torch_max": float(own.max(initial=0))}
        if error.size:
            limit = factors[0] * own.max() + 1e-5
            assert error.max() <= limit, f"{self.label}: max error {error.max():.3g} exceeds {limit:.3g}"
            limit = factors[1] * own.mean() + 1e-6
            assert error.mean() <= limit, f"{self.label}: mean error {error.mean():.3g} exceeds {limit:.3g}"
        if lse is not None:
            assert np.isneginf(as64(lse)[used:]).all(), f"{self.label}: lse of rows behind cu_nodes[B] must be -inf"
            got_lse = as64(lse)[:used]
            empty = np.isneginf(expected_lse[:used])
            assert (np.isneginf(got_lse) == empty).all(), f"{self.label}: lse is -inf exactly where nothing is visible"
            worst = np.abs(np.where(empty, 0, got_lse - np.where(empty, 0, expected_lse[:used]))).max(initial=0)
            limit = 2e-5 if self.tensors["q"].dtype == torch.float32 else 1e-3
            assert worst <= limit, f"{self.label}: lse error {worst:.3g} exceeds {limit:.3g}"
            report["lse"] = float(worst)
        return report


POSITIONAL = ("q", "k_cache", "v_cache", "page_table", "context_lens", "cu_nodes", "tree_mask")


def _keep_strides(tensor: torch.Tensor, device: str) -> torch.Tensor:
    if str(tensor.device) == device or tensor.device.type == device:
        return tensor
    reach = 1 + sum((n - 1) * s for n, s in zip(tensor.shape, tensor.stride())) if tensor.numel() else 0
    flat = torch.as_strided(tensor, (reach,), (1,), tensor.storage_offset()).to(device)
    return torch.as_strided(flat, tensor.shape, tensor.stride(), 0)


def build(
    trees: Sequence[Tree], contexts: Sequence[int], rng: Rng, *,
    heads: tuple[int, int] = (4, 2), dims: tuple[int, int] = (64, 64), page_size: int = 16, layout: str = "NHD",
    style: str = "dense", dtype: torch.dtype = torch.float32, kv_dtype: torch.dtype | None = None,
    mask: bool = True, query_start: Sequence[int] | None = None, causal: Sequence[bool] | None = None,
    scales: str | None = None, sinks: bool = False, tail_rows: int = 3, share_prefix: bool = False,
    max_nodes: int | None = None, label: str = "", **options: Any,
) -> Problem:  # fmt: skip
    """Allocate pages, fill caches and masks. Every row of `trees[b]` from query_start[b] on is a query."""
    q_heads, kv_heads = heads
    kv_dtype = kv_dtype or dtype
    starts = [0] * len(trees) if query_start is None else list(query_start)
    is_causal = [not mask or (causal is not None and causal[b]) for b in range(len(trees))]
    # Causal requests beside masked ones may be longer than the mask rows are wide.
    bound = max([1] + [len(tree) for tree, plain in zip(trees, is_causal) if not (mask and plain)])
    max_nodes = max_nodes or bound + int(rng.integers(0, 40))
    cu = np.cumsum([0] + [len(t) - s for t, s in zip(trees, starts)])
    num_rows = int(cu[-1]) + tail_rows

    # Pages: shuffled ids; requests may share the pages that lie wholly inside the first request's context.
    needed = [-(-(length + len(tree)) // page_size) for length, tree in zip(contexts, trees)]
    shared = [0] * len(trees)
    if share_prefix:
        shared = [0] + [min(contexts[0], length) // page_size for length in contexts[1:]]
    num_pages = sum(needed) - sum(shared) + 3
    free = rng.permutation(num_pages).tolist()
    table = rng.choice(DEAD_PAGE_IDS, size=(len(trees), max([1, *needed]) + 2))
    for b, (count, common) in enumerate(zip(needed, shared)):
        table[b, :count] = [*table[0, :common], *(free.pop() for _ in range(count - common))]

    middle = (page_size, kv_heads) if layout == "NHD" else (kv_heads, page_size)
    caches = []
    for dim in dims:
        cache = strided_cache(num_pages, middle, dim, style, kv_dtype)
        rows_first = cache if layout == "NHD" else cache.transpose(1, 2)
        for b, (length, tree) in enumerate(zip(contexts, trees)):
            live = length + len(tree)
            position = np.arange(live)
            fresh = torch.from_numpy(rng.standard_normal((live, kv_heads, dim), dtype=np.float32)).to(kv_dtype)
            pages, rows = table[b, position // page_size], position % page_size
            put_rows(rows_first, torch.from_numpy(pages), torch.from_numpy(rows), fresh, skip=shared[b] * page_size)
        caches.append(cache)

    words = None
    if mask:
        words = rng.integers(-(2**31), 2**31, size=(num_rows, -(-max_nodes // 32)))  # garbage where nobody may look
        for b, (tree, start) in enumerate(zip(trees, starts)):
            if is_causal[b]:
                continue
            live = (1 << len(tree)) - 1
            for i in range(start, len(tree)):
                row = sum(int(w & 0xFFFFFFFF) << 32 * k for k, w in enumerate(words[cu[b] + i - start]))
                bits = (row & ~live) | sum(1 << j for j in tree.visible[i])
                words[cu[b] + i - start] = [_signed(bits >> 32 * k & 0xFFFFFFFF) for k in range(words.shape[1])]

    positions = np.full(num_rows, -(10**6))
    for b, (tree, start, length) in enumerate(zip(trees, starts, contexts)):
        depths = range(len(tree)) if is_causal[b] else tree.depths
        positions[cu[b] : cu[b + 1]] = [length + d for d in depths][start:]

    qkv = torch.from_numpy(rng.standard_normal((num_rows, q_heads + 2, dims[0] + 3), dtype=np.float32)).to(dtype)
    qkv[cu[-1] :] = float("nan")
    count = 1 if scales == "tensor" else kv_heads
    int32 = lambda x: torch.tensor(np.asarray(x), dtype=torch.int32)  # noqa: E731
    scale = lambda: torch.tensor(rng.uniform(0.5, 2.0, count), dtype=torch.float32)  # noqa: E731
    tensors: dict[str, torch.Tensor | None] = {
        "q": qkv[:, 1:-1, : dims[0]] if style != "dense" else qkv[:, 1:-1, : dims[0]].contiguous(),
        "k_cache": caches[0], "v_cache": caches[1], "page_table": int32(table), "context_lens": int32(contexts),
        "cu_nodes": int32(cu), "tree_mask": None if words is None else int32(words),
        "query_start": None if query_start is None else int32(starts),
        "causal": None if causal is None else torch.tensor(list(causal), dtype=torch.bool),
        "positions": int32(positions) if mask and options.get("window", -1) >= 0 else None,
        "sinks": torch.tensor(rng.standard_normal(q_heads), dtype=torch.float32) if sinks else None,
        "k_scale": scale() if scales else None, "v_scale": scale() if scales else None,
    }  # fmt: skip
    return Problem(list(trees), tensors, max_nodes, {"kv_layout": layout, **options}, label)


def put_rows(cache: torch.Tensor, pages: torch.Tensor, rows: torch.Tensor, x: torch.Tensor, skip: int = 0) -> None:
    """cache[pages, rows] = x from entry `skip` on; bytes are moved because float8 has no index_put."""
    if x.dtype in FP8:
        cache, x = cache.view(torch.uint8), x.view(torch.uint8)
    cache[pages[skip:].long(), rows[skip:].long()] = x[skip:]


def _signed(word: int) -> int:
    return word - (1 << 32) if word >> 31 else word


def draw(rng: Rng, size: Size, **fixed: Any) -> Problem:
    """A random problem inside `size`; every axis can be fixed by keyword (tree=, batch=, contexts=, heads=, ...)."""
    pick = lambda options: options[int(rng.integers(len(options)))]  # noqa: E731
    kinds = [k for k in KINDS if k != "all_rows_empty"]
    batch = fixed.pop("batch", None) or pick(size.batches)
    wanted = fixed.pop("tree", None)
    trees = [KINDS[wanted if wanted and b == 0 else pick(kinds)](rng) for b in range(batch)]
    trees = [t if len(t) <= size.max_slots else KINDS["eagle26"](rng) for t in trees]
    contexts = list(fixed.pop("contexts", ()))
    contexts += [pick(size.contexts) for _ in range(batch - len(contexts))]
    axes: dict[str, Any] = {
        "heads": pick(size.heads), "dims": pick(size.head_dims), "page_size": pick(size.pages),
        "layout": pick(("NHD", "HND")), "style": pick(("dense", "padded", "interleaved")),
        "dtype": pick((torch.float32, torch.bfloat16, torch.float16)), "share_prefix": bool(pick((0, 1))),
    }  # fmt: skip
    if pick((0, 0, 1)):
        axes |= {"kv_dtype": pick(FP8), "scales": pick(("tensor", "head"))}
    if pick((0, 0, 1)):
        axes["softcap"] = pick((30.0, 50.0))
    if pick((0, 0, 1)):
        axes["window"] = pick(size.windows)
    axes["sinks"] = pick((0, 0, 1)) == 1
    axes |= fixed
    # Keep the float64 reference affordable: shorten the costliest request until the whole fits.
    while True:
        cost = [len(t) * (c + len(t)) * axes["heads"][0] * axes["dims"][0] for t, c in zip(trees, contexts)]
        worst = int(np.argmax(cost))
        if sum(cost) <= size.work or contexts[worst] == 0:
            break
        contexts[worst] //= 2
    label = f"contexts {contexts[:8]} slots {[len(t) for t in trees][:8]} {axes}"
    return build(trees, contexts, rng, label=label, **axes)
