"""A target whose layers are split over a group of ranks by transformers' own tensor-parallel plan.

Every rank runs the same engine on the same requests: it holds some of the heads, hence a KV cache of these heads alone,
and either the whole rows of logits (transformers gathers them) or its own columns of them. In the second case the rows
are verified where they are, see `verify_sharded`:

    lm_head "colwise_gather_output"   rank 0 [N, V]         rank 1 [N, V]        the same rows, verified twice
    lm_head "colwise"                 rank 0 [N, V / 2]     rank 1 [N, V / 2]    up to 64 bytes a row cross

Ranks stay in step because nothing that they decide differs: all-reduced states are the same bits everywhere, requests
have the same seeds (`Parallel.same`), and decisions that depend on measured time are refused (`expect_alike`).
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import torch.distributed as dist

_KEYS = ("k_proj", "qkv_proj", "query_key_value")  # whose output holds the keys
_GATHERED = ("colwise_gather_output", "colwise_rep")


class Parallel(NamedTuple):
    """This rank's part of a model. vocab_start: first of this rank's columns of logits; None: it has whole rows."""

    group: Any
    rank: int
    size: int
    num_kv_heads: int
    vocab_start: int | None

    @staticmethod
    def of(module: Any, num_kv_heads: int, name: str) -> Parallel | None:
        """How transformers has split `module` (from_pretrained(distributed_config=...)); None: not at all.

        NotImplementedError for splits other than tensor parallelism, ValueError for heads or a vocabulary that the
        number of ranks does not divide into equal parts (of whole words of 32 ids)."""
        config = getattr(module.config, "distributed_config", None)
        if config is None or module._mesh_manager is None:
            return None
        for kind in ("pp_size", "dp_size", "ep_size"):
            if getattr(config, kind) > 1:
                raise NotImplementedError(f"load_model: {name}: expected tensor parallelism, got {kind} > 1")
        group = module._mesh_manager.get_mesh("tp").get_group()
        rank, size = dist.get_rank(group), dist.get_world_size(group)
        plan: dict[str, str] = module.tp_plan
        if any(rule.rsplit(".", 1)[-1] in _KEYS and style == "colwise" for rule, style in plan.items()):
            if num_kv_heads % size:
                raise ValueError(
                    f"load_model: {name}: expected KV heads in {size} equal parts, got {num_kv_heads} heads"
                )
            num_kv_heads //= size
        head = module.get_output_embeddings()
        style = next((plan.get(path) for path, part in module.named_modules() if part is head), None)
        if style is None or style in _GATHERED:
            return Parallel(group, rank, size, num_kv_heads, None)
        if style != "colwise":
            raise NotImplementedError(f"load_model: {name}: expected an lm_head split by column, got {style!r}")
        if head.out_features % (32 * size):
            raise ValueError(
                f"load_model: {name}: expected a vocabulary of {size} equal parts of whole 32 ids, got "
                f"{head.out_features} ids; leave lm_head to transformers' own plan, which gathers its rows"
            )
        return Parallel(group, rank, size, num_kv_heads, rank * (head.out_features // size))

    def gather(self, logits: torch.Tensor) -> torch.Tensor:
        """Whole rows [N, V] from every rank's columns [N, V / size]; N is the same everywhere."""
        parts = [torch.empty_like(logits) for _ in range(self.size)]
        dist.all_gather(parts, logits.contiguous(), self.group)
        return torch.cat(parts, 1)

    def same(self, values: torch.Tensor) -> torch.Tensor:
        """The first rank's values, on every rank."""
        dist.broadcast(values, dist.get_global_rank(self.group, 0), self.group)
        return values


def expect_alike(policy: Any, drafter: Any, config: Any) -> None:
    """ValueError for what would let ranks plan different steps, because it depends on each rank's own clock, and for
    captured graphs, which hold whole rows."""
    from specdec_kernels.engine.policy import FixedDrafts

    def refuse(what: str, expected: str, got: Any) -> ValueError:
        return ValueError(f"Engine: {what}: expected {expected} under tensor parallelism, got {got}")

    if not isinstance(policy, FixedDrafts):
        raise refuse("policy", "FixedDrafts", type(policy).__name__)
    if config.draft_timeout_s is not None:
        raise refuse("draft_timeout_s", "None", config.draft_timeout_s)
    if config.graph_sizes:
        raise refuse("graph_sizes", "none", config.graph_sizes)
    if drafter.name == "self" and getattr(drafter, "choice", None) is None:
        raise refuse("drafter", "SelfDrafter(layers=...)", "one that measures which layers to leave out")


def whole(tensor: torch.Tensor) -> torch.Tensor:
    """A parameter's full value, which may lie in parts on all ranks."""
    full: Any = getattr(tensor, "full_tensor", None)
    return tensor if full is None else full()
