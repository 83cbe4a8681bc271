"""Claim: a draft batch of 1 to 4 cuts the draft's time by 35 % and saturates beyond 8.

What a draft pass costs a request is measured by batch size, on the engine's own forward: one new token a request behind
256 cached ones. Two drafts of SmolLM2-135M's width: one layer with a 4096-token head (the size of an EAGLE head), and
four layers over the whole vocabulary. Random weights, bfloat16 where it is fast: time does not depend on the values.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch

from benchmarks import machine
from benchmarks.claims.common import Claim
from benchmarks.claims.threshold import CONTEXT, decoder
from benchmarks.harness import interleave
from specdec_kernels.attention import slot_mapping
from specdec_kernels.engine import Batch, TransformersModel

PAGE = 16
DRAFTS = {"EAGLE head's size (1 layer, 4096 ids)": (1, 4096), "small model (4 layers, 49152 ids)": (4, 49152)}


def draft_pass(model: TransformersModel, batch: int) -> Callable[[], torch.Tensor]:
    """A call that runs one new token for each of `batch` requests behind CONTEXT tokens of random KV; it writes the
    same slots each time."""
    pages = -(-(CONTEXT + 1) // PAGE)
    cache = model.allocate_cache(batch * pages, PAGE)
    rng = torch.Generator().manual_seed(2)
    for tensor in (*cache.k, *cache.v):
        one = torch.randn(pages, *tensor.shape[1:], generator=rng).to(
            tensor.dtype
        )  # every request's context is the same
        tensor.view(batch, pages, *tensor.shape[1:]).copy_(one.expand(batch, *one.shape))
    table = torch.arange(batch * pages, dtype=torch.int32).view(batch, pages)
    lens = torch.full((batch,), CONTEXT, dtype=torch.int32)
    cu = torch.arange(batch + 1, dtype=torch.int32)
    packed = Batch(
        token_ids=torch.full((batch,), 7), positions=lens, slots=slot_mapping(table, lens, cu, PAGE, total_nodes=batch),
        page_table=table, context_lens=lens, cu_nodes=cu, max_nodes=1,
    )  # fmt: skip
    return lambda: model.forward(packed, cache)


def measure(quick: bool) -> dict[str, dict[int, Any]]:
    """Timings by draft and batch size; all sizes of a draft in the same interleaved rounds."""
    sizes = [1, 4] if quick else [1, 2, 4, 8, 16, 32]
    dtype = torch.bfloat16 if torch.backends.mkldnn.is_available() else torch.float32
    found = {}
    for name, (layers, vocab_size) in DRAFTS.items():
        model = TransformersModel(decoder(layers, dtype, vocab_size))
        calls = {str(batch): draft_pass(model, batch) for batch in sizes}
        alone = calls["1"]()
        for batch in sizes:  # gate: a request's logits are the same in any company, up to the product's rounding
            rows = calls[str(batch)]()
            if not torch.allclose(rows.float(), alone.float().expand(batch, -1), atol=0.05, rtol=0.05):
                raise AssertionError(f"draft_batch: batch {batch} gives other logits than batch 1, nothing measured")
        timings = interleave(calls, rounds=5 if quick else 20, budget=10.0 if quick else 40.0)
        found[name] = {int(batch): timing for batch, timing in timings.items()}
    return found


def saturation(times: dict[int, float], share: float = 0.1) -> int:
    """The first batch size whose doubling (or next size) saves less than `share` of a request's time."""
    sizes = sorted(times)
    for size, following in itertools.pairwise(sizes):
        if times[following] / following > (1 - share) * times[size] / size:
            return size
    return sizes[-1]


def main(argv: Sequence[str] | None = None) -> int:
    claim = Claim("draft_batch", __doc__, argv)
    with machine.Quiet() as quiet:
        measured = measure(claim.quick)
    rows, figures, clauses = [], {}, []
    for name, timings in measured.items():
        seconds = {batch: timing.median for batch, timing in timings.items()}
        for batch, timing in timings.items():
            share = seconds[batch] / batch / seconds[1]
            spread = f"{timing.quantile(0.1) * 1e3:.2f}..{timing.quantile(0.9) * 1e3:.2f}"
            rows.append([name, batch, timing.median * 1e3, spread, share])
        cut, full = 1 - seconds[4] / 4 / seconds[1], saturation(seconds)
        figures[name] = {
            "time_a_request_cut_1_to_4": cut, "saturates_at": full,
            "seconds": seconds, "share_a_request": {b: s / b / seconds[1] for b, s in seconds.items()},
        }  # fmt: skip
        clauses.append(f"{name}: a request's share falls by {cut:.0%} from batch 1 to 4, saturates at {full}")
    claim.table("one draft pass by batch size", ["draft", "batch", "ms", "p10..p90", "a request's share"], rows)
    with claim.plot("A request's share of a draft pass", "batch size", "of the time at batch 1") as axes:
        for name in measured:
            shares = figures[name]["share_a_request"]
            axes.plot(list(shares), list(shares.values()), marker="o", label=name)
        axes.set_xscale("log", base=2)
        axes.axhline(0.65, color="#888888", lw=1, ls=":")
    return claim.conclude(
        says="a draft batch of 1 to 4 cuts draft time by 35 %, saturated beyond 8",
        so="; ".join(clauses),
        figures={"drafts": figures, "machine": machine.describe(), "foreign_cpu": quiet.foreign},
    )


if __name__ == "__main__":
    sys.exit(main())
