"""Verification and sampling against one read of the logits and against what people use instead.

    python -m benchmarks.bench_sampling [--quick] [--out FILE]    (vLLM joins with the interpreter of `make venv-vllm`)

`read` is one pass over a buffer above 256 MB (`amax` of its float32 view, same threads, same rounds). `reads` in a line
is a time over the time of reading once, at that rate, the rows its form needs: every target and draft row for eager,
only the visited ones for lazy. Gates: eager and lazy agree, and accepted counts equal a float64 evaluation.
"""

from __future__ import annotations

import argparse
import importlib.util
import sys
from typing import Any

import torch
from torch import Tensor

import specdec_kernels as sk
from benchmarks import sampling_peers as peers
from benchmarks.harness import Bench, add_options
from benchmarks.sampling_vllm import vllm_speculative

READ_BYTES = 320 << 20
FILTERS = {"none": {}, "top_k 50 + top_p .9": dict(top_k=50, top_p=0.9), "top_p .9": dict(top_p=0.9)}


class Chains:
    """B chains of gamma drafts drawn from the drafter's own (filtered) law; `agree` makes drafter and target equal."""

    def __init__(self, B: int, gamma: int, V: int, dtype: torch.dtype, agree: bool, **filters: Any):
        torch.manual_seed(0)
        self.B, self.gamma, self.V, self.filters = B, gamma, V, filters
        self.target = (torch.randn(B, gamma + 1, V) * 3).to(dtype)
        self.draft = self.target[:, :-1].clone() if agree else (torch.randn(B, gamma, V) * 3).to(dtype)
        self.sampling = sk.Sampling.of(B, seed=list(range(B)), **filters)
        rows = torch.arange(B, dtype=torch.int32).repeat_interleave(gamma)
        drafted = sk.draft_sample(
            self.draft.view(-1, V), 1, self.sampling, row_requests=rows, row_positions=torch.arange(gamma).repeat(B)
        )
        self.ids = drafted.token_ids.view(B, gamma)
        self.flat_ids = torch.cat([torch.zeros(B, 1, dtype=torch.int32), self.ids], 1).view(-1).contiguous()
        counts = torch.full((B,), gamma, dtype=torch.int32)
        lens = torch.zeros(B, dtype=torch.int32)
        self.tree = sk.chain_tree(counts, lens, total_nodes=B * (gamma + 1), max_nodes=gamma + 1)
        self.uniforms = torch.rand(B, gamma + 1)

    def verify(self, form: str, uniforms: Tensor | None = None) -> sk.Verified:
        return sk.verify(
            self.target.view(-1, self.V), self.flat_ids, self.tree, self.sampling, method="rejection",
            draft_logits=self.draft.view(-1, self.V), form=form, uniforms=uniforms,
        )  # fmt: skip

    def gate(self) -> bool:
        eager, lazy = self.verify("eager"), self.verify("lazy")
        same = all(torch.equal(a, b) for a, b in zip(eager[:4], lazy[:4], strict=True))
        ours = self.verify("lazy", self.uniforms.view(-1))
        p, q = (self._law(x).double() for x in (self.target, self.draft))
        right = peers._accepted(p, q, self.ids.long(), self.uniforms[:, 1:].double()) + 1
        last = ours.output_token_ids.gather(1, ours.num_emitted.long()[:, None] - 1)
        possible = p[torch.arange(self.B), ours.num_emitted.long() - 1].gather(1, last.long()) > 0
        return same and torch.equal(ours.num_emitted.long(), right) and bool(possible.all())

    def _law(self, logits: Tensor) -> Tensor:
        """float64, by a stable sort: among equal logits the lowest ids are kept."""
        if not self.filters:
            return logits.double().softmax(-1)
        values, order = logits.double().sort(stable=True, dim=-1, descending=True)
        if k := self.filters.get("top_k", 0):
            values[..., k:] = -torch.inf
        mass = values.softmax(-1)
        mass[mass.cumsum(-1) - mass >= self.filters["top_p"]] = 0
        return torch.zeros_like(mass).scatter(-1, order, mass / mass.sum(-1, keepdim=True))

    def bytes_read(self, form: str) -> int:
        row = self.V * self.target.element_size()
        if form == "eager":
            return self.B * (2 * self.gamma + 1) * row
        emitted = self.verify("lazy").num_emitted
        return int((emitted + emitted.clamp(max=self.gamma)).sum()) * row


def report_reads(rows: list[dict[str, Any]], needed: dict[str, int]) -> None:
    seconds = {row["provider"]: row["median_s"] for row in rows}
    rate = READ_BYTES / seconds["read"]
    print("    " + "; ".join(f"{name} {seconds[name] * rate / size:.2f} reads" for name, size in needed.items()))


def chains(
    bench: Bench, read: Tensor, B: int, gamma: int, V: int, dtype: torch.dtype, with_peers: bool, names: list[str]
) -> None:
    if with_peers and not importlib.util.find_spec("transformers"):
        print("transformers: not installed, left out", flush=True)
    for name, filters in ((n, f) for n, f in FILTERS.items() if n in names):
        for agree in (True, False):
            data = Chains(B, gamma, V, dtype, agree, **filters)
            args = (data.target, data.draft, data.ids.long())
            providers = {
                "lazy": lambda d=data: d.verify("lazy"),
                "eager": lambda d=data: d.verify("eager"),
                "read": read.amax,
            }
            if with_peers and not filters:
                providers["torch"] = lambda a=args, d=data: peers.torch_straight(*a, d.uniforms[:, 1:])
                providers["torch inverse cdf"] = lambda a=args, d=data: peers.torch_inverse_cdf(*a, d.uniforms[:, 1:])
                providers["transformers"] = lambda a=args: peers.transformers_speculative(*a)
            elif with_peers:
                k, p = filters.get("top_k", 0), filters["top_p"]
                providers["torch sort"] = lambda a=args, d=data, k=k, p=p: peers.torch_sorted(
                    *a, d.uniforms[:, 1:], k, p
                )
                providers["transformers"] = lambda a=args, k=k, p=p: peers.transformers_speculative(*a, k, p)
            if not importlib.util.find_spec("transformers"):
                providers.pop("transformers", None)
            if with_peers and (vllm := vllm_speculative(*args, filters.get("top_k", 0), filters.get("top_p", 1.0))):
                providers["vllm"] = vllm
            drafts = "all accepted" if agree else "first rejected"
            shape = dict(op="verify", B=B, gamma=gamma, V=V, dtype=str(dtype)[6:], filters=name, drafts=drafts)
            rows = bench.compare(shape, providers, data.gate)
            report_reads(rows, {form: data.bytes_read(form) for form in ("lazy", "eager")})


def trees(bench: Bench, V: int, dtype: torch.dtype) -> None:
    """A 64-node tree of deterministic drafts against a chain that visits as many rows, several of them."""
    torch.manual_seed(0)
    parents = [-1, *[(i - 1) // 2 for i in range(1, 64)]]
    logits = torch.randn(64, V) * 3
    top = logits.topk(2, -1).indices
    logits.scatter_add_(1, top, torch.full(top.shape, 10.0))  # the children hold most of the mass
    logits = logits.to(dtype)
    nodes = torch.tensor(parents, dtype=torch.int32)
    lens, ends = torch.zeros(1, dtype=torch.int32), torch.tensor([0, 64], dtype=torch.int32)
    tree = sk.build_tree(nodes, ends, lens, max_nodes=64)
    ids = torch.tensor([0, *(int(top[parents[i], (i - 1) % 2]) for i in range(1, 64))], dtype=torch.int32)

    def tree_run(sampling: sk.Sampling) -> sk.Verified:
        return sk.verify(logits, ids, tree, sampling, method="target_only", form="lazy")

    sampling = next(s for s in (sk.Sampling.of(1, seed=n) for n in range(100)) if int(tree_run(s).num_emitted) == 6)
    rows = tree_run(sampling).accepted_nodes[0, :6].long()
    chain = sk.chain_tree(torch.tensor([5], dtype=torch.int32), lens, total_nodes=6, max_nodes=6)
    path_logits, path_ids = logits[rows].contiguous(), ids[rows].contiguous()
    sure = torch.zeros(6)  # coins of 0 accept the whole chain

    def chain_run() -> sk.Verified:
        return sk.verify(path_logits, path_ids, chain, sampling, method="target_only", form="lazy", uniforms=sure)

    def gate() -> bool:
        return torch.equal(chain_run().output_token_ids[0], tree_run(sampling).output_token_ids[0, :6])

    shape = dict(op="verify", nodes=64, V=V, dtype=str(dtype)[6:], visited=6)
    bench.compare(shape, {"chain": chain_run, "tree": lambda: tree_run(sampling)}, gate)


def drafts(bench: Bench, read: Tensor, R: int, k: int, V: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    logits = (torch.randn(R, V) * 3).to(dtype)

    def in_torch() -> tuple[Tensor, Tensor]:
        return torch.log_softmax(logits, -1, dtype=torch.float32).topk(k)

    def gate() -> bool:
        ours, right = sk.draft_topk(logits, k), in_torch()
        return torch.allclose(ours.log_probs, right[0], atol=1e-5)

    providers = {"draft_topk": lambda: sk.draft_topk(logits, k), "read": read.amax, "torch": in_torch}
    rows = bench.compare(dict(op="draft_topk", R=R, k=k, V=V, dtype=str(dtype)[6:]), providers, gate)
    report_reads(rows, {"draft_topk": logits.numel() * logits.element_size()})


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="bench_sampling", description=__doc__.splitlines()[0])
    add_options(parser, quick="one small shape")
    parser.add_argument("--no-peers", action="store_true", help="only our forms and the read")
    parser.add_argument("--only", nargs="*", default=[*FILTERS, "trees", "drafts"], help="parts: %(default)s")
    options = parser.parse_args(argv)
    bench = Bench("sampling", options.out, rounds=5 if options.quick else 9, resume=options.resume)
    read = torch.ones(READ_BYTES // 4)
    V = 32000 if options.quick else 128256
    chains(bench, read, 2 if options.quick else 8, 5, V, torch.bfloat16, not options.no_peers, options.only)
    if "trees" in options.only:
        trees(bench, V, torch.bfloat16)
    if "drafts" in options.only:
        drafts(bench, read, 8, 8, V, torch.bfloat16)
    if not options.quick:
        chains(bench, read, 8, 5, V, torch.float32, False, options.only)
    return 0


if __name__ == "__main__":
    sys.exit(main())
