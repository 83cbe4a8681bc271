"""Acceptance of a pair of models, measured: teacher-forced over given logits, or on-policy by running both.

Everything is float64 on the CPU: this is a measurement, not a decoding path. A model is any callable from token ids
int64[n] to next-token logits [n, V].
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch

from specdec_kernels.advisor.acceptance import AcceptanceLog, StepRecord

Model = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Filters:
    """Sampling of one request, in the order temperature, min-p, top-k (lowest ids first among ties), top-p.
    Temperature at most 1e-5 is greedy, lowest id among ties. top_k 0, top_p 1, min_p 0 are off."""

    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0

    def law(self, logits: torch.Tensor) -> torch.Tensor:
        """Probabilities of logits [..., V], float64. Errors: ValueError for a NaN."""
        logits = logits.double()
        if torch.isnan(logits).any():
            raise ValueError("law: logits: expected numbers, got NaN")
        if self.temperature <= 1e-5:
            return torch.nn.functional.one_hot(logits.argmax(-1), logits.shape[-1]).double()
        law = torch.softmax(logits / self.temperature, -1)
        if self.min_p > 0:
            law = torch.where(law >= self.min_p * law.amax(-1, keepdim=True), law, 0.0)
        if 0 < self.top_k < law.shape[-1] or self.top_p < 1:
            ordered, ids = torch.sort(law, dim=-1, descending=True, stable=True)
            if self.top_k > 0:
                ordered[..., self.top_k :] = 0.0
            before = ordered.cumsum(-1) - ordered  # a token stays while the mass before it is short of top_p
            kept = before < self.top_p * ordered.sum(-1, keepdim=True)
            kept[..., 0] = True
            law = torch.zeros_like(law).scatter(-1, ids, torch.where(kept, ordered, 0.0))
        return law / law.sum(-1, keepdim=True)


def overlap(
    target_logits: torch.Tensor,
    draft_logits: torch.Tensor,
    *,
    filters: Filters = Filters(),
    draft_filters: Filters | None = None,
    vocab_size: int | None = None,
    d2t: torch.Tensor | None = None,
) -> torch.Tensor:
    """1 - TV of both laws, float64 [...]: the chance that a draft is accepted, sum over x of min(target, draft).

    target_logits [..., Vt], draft_logits [..., Vd]; widths may differ by padding: ids from vocab_size (default:
    Vt) on have no mass on either side, and ids beyond Vd none in the draft. d2t: offsets of a reduced vocabulary, as
    `check_d2t` returns them. draft_filters: None means the target's. Greedy gives 1 where both agree and 0 elsewhere.
    Errors: ValueError for unequal leading shapes.
    """
    if target_logits.shape[:-1] != draft_logits.shape[:-1]:
        raise ValueError(
            f"overlap: draft_logits: expected leading shape {list(target_logits.shape[:-1])}, "
            f"got {list(draft_logits.shape[:-1])}"
        )
    width = target_logits.shape[-1]
    valid = width if vocab_size is None else vocab_size
    own = target_logits.double().cpu().clone()
    own[..., valid:] = -torch.inf
    spread = _scatter(draft_logits, width, valid, d2t)
    return torch.minimum(filters.law(own), (draft_filters or filters).law(spread)).sum(-1)


def measure_acceptance(
    target: Model,
    draft: Model,
    prompts: Sequence[torch.Tensor],
    *,
    num_drafts: int,
    max_tokens: int,
    filters: Filters = Filters(),
    vocab_size: int | None = None,
    d2t: torch.Tensor | None = None,
    domains: Sequence[str] | None = None,
    eos_token_id: int | None = None,
    seed: int = 0,
) -> AcceptanceLog:
    """Run chain speculation (Leviathan et al.) on every prompt and record each step; the text has the target's law.

    Each step drafts num_drafts tokens from the draft's own continuation, judges them up to the first rejection, and
    goes on from the target's text. Overlaps are recorded at reached positions only. Prompt i is request i, with its
    own random stream, so the result does not depend on the other prompts. Errors: ValueError for an empty prompt.
    """
    log = AcceptanceLog()
    if not prompts:
        return log
    width = target(prompts[0][:1].long()).shape[-1]
    valid = width if vocab_size is None else vocab_size
    for index, prompt in enumerate(prompts):
        if prompt.ndim != 1 or not len(prompt):
            raise ValueError(
                f"measure_acceptance: prompts: expected non-empty [n], got {list(prompt.shape)} at {index}"
            )
        rng = np.random.default_rng([seed, index])
        text = prompt.long().cpu()
        start, done = len(text), False
        while len(text) - start < max_tokens and not done:
            laws, drafted_text = [], text
            for _ in range(num_drafts):
                laws.append(filters.law(_scatter(draft(drafted_text)[-1], width, valid, d2t)))
                drafted_text = torch.cat([drafted_text, _draw(rng, laws[-1])])
            rows = target(drafted_text)[len(text) - 1 :].double().cpu().clone()
            rows[:, valid:] = -torch.inf
            own = filters.law(rows)
            accepted, overlaps, extra = 0, [], own[num_drafts]
            for i, drafted in enumerate(drafted_text[len(text) :].tolist()):
                overlaps.append(float(torch.minimum(own[i], laws[i]).sum()))
                if (
                    rng.random() * laws[i][drafted] >= own[i][drafted]
                ):  # strict, without a division: no mass, no acceptance
                    residual = (own[i] - laws[i]).clamp(min=0)
                    extra = residual / residual.sum() if residual.sum() > 0 else own[i]
                    break
                accepted += 1
            drafted_text = torch.cat([drafted_text[: len(text) + accepted], _draw(rng, extra)])
            new = drafted_text[len(text) :].tolist()[: max_tokens - (len(text) - start)]
            if eos_token_id in new:
                new, done = new[: new.index(eos_token_id) + 1], True
            text = torch.cat([text, torch.tensor(new)])
            overlaps = overlaps[: len(new)]  # positions behind a cut reach no text
            domain = domains[index] if domains is not None else ""
            log.add(
                StepRecord(
                    index,
                    num_drafts,
                    accepted,
                    len(new),
                    domain=domain,
                    temperature=filters.temperature,
                    overlaps=tuple(min(1.0, value) for value in overlaps),
                )
            )
    return log


def _scatter(draft_logits: torch.Tensor, width: int, vocab_size: int, d2t: torch.Tensor | None) -> torch.Tensor:
    """Draft logits [..., Vd] in target columns, float64 [..., width]; -inf (no mass) where the draft has no token.

    Draft columns whose target lies behind vocab_size lose their mass before normalisation, so a padded head of any
    width gives the law of its real tokens.
    """
    ids = torch.arange(draft_logits.shape[-1])
    if d2t is not None:
        if d2t.shape != ids.shape:
            raise ValueError(f"overlap: d2t: expected {list(ids.shape)}, got {list(d2t.shape)}")
        ids = ids + d2t.cpu()
    kept = (ids < min(vocab_size, width)).nonzero().flatten()
    if not len(kept):
        raise ValueError("overlap: d2t: expected at least one draft id below vocab_size, got none")
    out = torch.full((*draft_logits.shape[:-1], width), -torch.inf, dtype=torch.float64)
    out[..., ids[kept]] = draft_logits[..., kept].double().cpu()
    return out


def _draw(rng: np.random.Generator, law: torch.Tensor) -> torch.Tensor:
    """One id drawn from law [V] by inversion, int64[1]; an id without mass is never drawn."""
    cumulative = law.cumsum(0)
    at = int(torch.searchsorted(cumulative, rng.random() * float(cumulative[-1]), right=True))
    return torch.tensor([min(at, int(law.nonzero()[-1]))])
