"""A step's verification: the rule that fits how its drafts came about, on whole rows or on this rank's columns."""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels import verify_sharded
from specdec_kernels.engine.drafters.laws import draft_laws
from specdec_kernels.engine.edits import process_rows, step_edits
from specdec_kernels.engine.pack import Packed, make_sampling
from specdec_kernels.sampling import Verified, verify

_ON_SHARDS = ("greedy",)  # the rules of `verify_sharded` that this engine uses; for others rows are gathered


def verify_step(model: Any, packed: Packed, logits: torch.Tensor) -> Verified:
    """Greedy, or the rule that fits how the drafts came about: all fixed, or some drawn from a known law.

    logits: [N, V or more]; on a model split by columns [N, V / ranks]. Its rows are gathered where a request edits them
    (penalties, grammars, processors) or the rule needs laws of the drafts.
    """
    laws: dict[str, Any] = {}
    if all(state.request.temperature <= 1e-5 for state in packed.states):
        method = "greedy"
    elif all(draft.logits is None for draft in packed.drafts):
        method = "target_only"
    else:
        method, laws = "rejection", draft_laws(packed.drafts, model.vocab_size, model.device)
    sampling = make_sampling(packed.states, model.device)
    asked = {state.request.logprobs for state in packed.states} - {None}
    logprobs = None if not asked else asked.pop() if len(asked) == 1 else "both"
    parallel = getattr(model, "parallel", None)
    if parallel is not None and parallel.vocab_start is not None:
        edited = any(s.edits is not None or s.request.logits_processor is not None for s in packed.states)
        if method in _ON_SHARDS and not edited:
            columns = max(0, min(logits.shape[1], model.vocab_size - parallel.vocab_start))
            return verify_sharded(
                logits[:, :columns], packed.draft_token_ids, packed.tree, sampling, method=method,
                vocab_start=parallel.vocab_start, group=parallel.group, return_logprobs=logprobs,
            )  # fmt: skip
        logits = parallel.gather(logits)
    logits = process_rows(packed.states, packed.drafts, logits)
    return verify(
        logits,
        packed.draft_token_ids,
        packed.tree,
        sampling,
        method=method,
        vocab_size=model.vocab_size,
        return_logprobs=logprobs,
        **laws,
        **step_edits(packed.states, packed.drafts, logits, model.vocab_size),  # type: ignore[arg-type]
    )
