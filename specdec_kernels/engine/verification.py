"""A step's verification: the rule that fits how its drafts came about, on whole rows or on this rank's columns."""

from __future__ import annotations

from typing import Any

import torch

from specdec_kernels import verify_sharded
from specdec_kernels.engine.drafters.laws import draft_laws
from specdec_kernels.engine.edits import process_rows, step_edits
from specdec_kernels.engine.pack import Packed, make_sampling
from specdec_kernels.engine.request import RequestState
from specdec_kernels.sampling import Sampling, Verified, verify


def verify_step(model: Any, packed: Packed, logits: torch.Tensor) -> Verified:
    """Greedy, or the rule that fits how the drafts came about: all fixed, or some drawn from a known law.

    logits: [N, V or more]; on a model split by columns [N, V / ranks], whose rows are gathered where a request's edits
    read them (repetition penalties, processors).
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
        if not any(_reads_rows(state) for state in packed.states):
            return _on_shards(model, packed, logits, sampling, method, laws, logprobs)
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


def _reads_rows(state: RequestState) -> bool:
    return state.request.logits_processor is not None or (state.edits is not None and state.edits.repeating)


def _on_shards(
    model: Any,
    packed: Packed,
    logits: torch.Tensor,
    sampling: Sampling,
    method: str,
    laws: dict[str, Any],
    logprobs: str | None,
) -> Verified:
    """`verify_sharded` of this rank's columns: of the drafts' laws (whole rows on every rank) too, and of the edits."""
    start, size, vocab = model.parallel.vocab_start, logits.shape[1], model.vocab_size
    rows = logits.new_empty(()).expand(len(logits), vocab)  # stands for the whole rows, which nobody reads
    edits: dict[str, Any] = step_edits(packed.states, packed.drafts, rows, vocab)
    if "allowed" in edits:
        words = torch.nn.functional.pad(edits["allowed"], (0, -(-(start + size) // 32)))
        edits["allowed"] = words[:, start // 32 : -(-(start + size) // 32)]
    if laws and laws["d2t"] is None:
        law = laws["draft_logits"]
        law = torch.nn.functional.pad(law, (0, max(0, start + size - law.shape[1])), value=-torch.inf)
        laws = laws | {"draft_logits": law[:, start : start + size]}
    return verify_sharded(
        logits, packed.draft_token_ids, packed.tree, sampling, method=method, vocab_start=start,
        group=model.parallel.group, vocab_size=vocab, return_logprobs=logprobs,
        max_siblings=None if packed.branched else 1, **laws, **edits,
    )  # fmt: skip
