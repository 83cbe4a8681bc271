"""Our attention under transformers' own loop and caches: `model.set_attn_implementation(register_attention())`.

The dense cache of a layer, [B, Hkv, k, D], is read in place, as pages of k tokens a sequence. Under padding it is read
as pages of one token, and each sequence's page table names the rows that hold its tokens:

    mask of sequence b    0 0 1 1 1 1 | 1 1      4 tokens of context, 2 queries
    page table            b*Hkv*k + (2, 3, 4, 5, 6, 7)
"""

from __future__ import annotations

import inspect
from typing import Any

import torch

from specdec_kernels.attention import tree_attention

NAME = "specdec_kernels_dense"


def register_attention() -> str:
    """Register `dense_attention` with transformers and return its name, for `set_attn_implementation`."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(NAME, dense_attention)
    AttentionMaskInterface.register(NAME, padding_mask)
    return NAME


def padding_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    q_offset: Any = 0,
    kv_offset: int = 0,
    mask_function: Any = None,
    attention_mask: torch.Tensor | None = None,
    **_: Any,
) -> torch.Tensor | None:
    """transformers' mask interface: bool [B, kv_length], which keys are tokens; None: all of them. NotImplementedError
    for a mask function that is not causal, or causal within a window (packed sequences, chunks, bidirectional parts),
    and for static caches."""
    if not _is_causal(mask_function):
        got = getattr(mask_function, "__qualname__", mask_function)
        raise NotImplementedError(
            f"{NAME}: mask_function: expected causal attention, within a window or not, got {got} "
            "(packed sequences, chunked attention and bidirectional parts are not supported)"
        )
    seen = int(q_offset) + q_length
    if attention_mask is None:
        known = kv_length <= seen
    elif attention_mask.dim() != 2:
        raise NotImplementedError(f"{NAME}: attention_mask: expected [B, k], got {list(attention_mask.shape)}")
    else:
        attention_mask = attention_mask[:, -kv_length:].bool()
        known = attention_mask.shape[1] == kv_length
    if not known:
        raise NotImplementedError(f"{NAME}: a static cache is not supported ({kv_length} keys, {seen} tokens seen)")
    return None if attention_mask is None or bool(attention_mask.all()) else attention_mask


def dense_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    dropout: float = 0.0,
    sliding_window: int | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """transformers' attention interface: query [B, Hq, q, D], key and value [B, Hkv, k, D], the last q keys those of
    the queries -> [B, q, Hq, D]; rows of padding are 0. NotImplementedError for dropout and for attention that is not
    causal."""
    if dropout:
        raise NotImplementedError(f"{NAME}: dropout is not supported, got {dropout}")
    if not getattr(module, "is_causal", True):
        raise NotImplementedError(f"{NAME}: expected causal attention, got a layer that is not")
    batch, num_q_heads, q_length, head_dim = query.shape
    num_kv_heads, kv_length = key.shape[1:3]
    options: dict[str, Any] = {
        "softmax_scale": scaling, "softcap": softcap or 0.0, "window": sliding_window or -1, "sinks": s_aux,
        "kv_layout": "HND",
    }  # fmt: skip
    device = query.device
    rows = query.transpose(1, 2).reshape(batch * q_length, num_q_heads, head_dim)
    if attention_mask is None:
        out = tree_attention(
            rows, key, value,
            torch.arange(batch, dtype=torch.int32, device=device)[:, None],
            torch.full((batch,), kv_length - q_length, dtype=torch.int32, device=device),
            torch.arange(batch + 1, dtype=torch.int32, device=device) * q_length,
            None, max_nodes=q_length, **options,
        )  # fmt: skip
        assert isinstance(out, torch.Tensor)
        return out.view(batch, q_length, num_q_heads, -1), None
    queries = attention_mask[:, kv_length - q_length :]
    lens, counts = attention_mask.sum(1, dtype=torch.int32), queries.sum(1, dtype=torch.int32)
    order, real = _tokens_first(attention_mask), _tokens_first(queries.reshape(-1))
    first = torch.arange(batch, device=device)[:, None] * (num_kv_heads * kv_length)
    out = tree_attention(
        rows[real], _by_token(key), _by_token(value), (first + order).to(torch.int32), lens - counts,
        torch.nn.functional.pad(counts.cumsum(0), (1, 0)).to(torch.int32), None, max_nodes=q_length, **options,
    )  # fmt: skip
    assert isinstance(out, torch.Tensor)
    whole = torch.empty_like(out)
    whole[real] = out  # rows behind the tokens are 0
    return whole.view(batch, q_length, num_q_heads, -1), None


def _tokens_first(mask: torch.Tensor) -> torch.Tensor:
    """Indices of what is in the mask, in its order, then of the rest: no count is read, which would stop the stream."""
    return (~mask).to(torch.int8).argsort(dim=-1, stable=True)


def _is_causal(mask_function: Any) -> bool:
    """Whether one of transformers' mask functions says causal, or causal within a window, and nothing else: all that
    the layers' own arguments tell `dense_attention`."""
    from transformers import masking_utils as theirs

    if mask_function in (None, theirs.causal_mask_function):
        return True
    same = theirs.sliding_window_causal_mask_function(1)
    parts, wanted = ([f.__code__ for f in _closure(function)] for function in (mask_function, same))
    return mask_function.__code__ is same.__code__ and parts == wanted


def _closure(function: Any) -> tuple[Any, ...]:
    """The functions that one of transformers' `and_masks` or `or_masks` joins."""
    return tuple(inspect.getclosurevars(function).nonlocals.get("mask_functions", ()))


def _by_token(cache: torch.Tensor) -> torch.Tensor:
    """A cache [B, H, k, D] as pages of one token, [B * H * k, H, 1, D]: page n is row n, and head h of it lies h * k
    rows behind. Of these overlapping pages those at b * H * k + i are read."""
    cache = cache.contiguous()
    batch, heads, length, dim = cache.shape
    pages = batch * heads * length - (heads - 1) * length  # the last page that lies inside, and those before it
    if pages > 2**31 - 1:
        raise NotImplementedError(f"{NAME}: expected a cache of fewer than 2**31 rows, got {pages}")
    return cache.as_strided((pages, heads, 1, dim), (dim, length * dim, dim, 1))
