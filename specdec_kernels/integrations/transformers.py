"""Speculation inside transformers: `model.generate(..., custom_generate=specdec_generate(drafter="ngram"))`.

The model stays as it is: for the time of the call its attention reads our paged cache, afterwards its own again.
Batches may be ragged (an attention mask tells the padding), sampled or greedy, and every generation option that is a
logits processor or a stopping criterion is honoured at every node of the draft tree.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any

import torch

from specdec_kernels.engine import Engine, EngineConfig, Event, Request, TransformersModel

_OP = "specdec_generate"
_PAGE = 16
_KEPT = "_specdec_kernels_target"  # on the model: its hooks are registered once, and it goes when the model goes
_lock = threading.RLock()  # a model's attention is exchanged for the time of a call: one call at a time


def specdec_generate(
    drafter: Any = "ngram",
    *,
    num_drafts: int = 15,
    streamer: Any = None,
    policy: Any = None,
) -> Callable[..., Any]:
    """A decoding loop for `generate(custom_generate=...)`, transformers 5.

    drafter: a name (`ngram`, `self`, `eagle3`, ...) or a drafter object; num_drafts: most draft nodes a sequence and
    step; policy: see `Engine`. streamer: give it here, because `generate` does not hand its own on to a custom loop
    (5.23); batch size 1 only. It gets what `generate` would give it: the prompt [1, n], then each token.

    Greedy output equals `generate`'s up to ties that rounding decides; sampled output has its law, but other tokens
    than `generate` would draw. Seeds come from torch's generator: `torch.manual_seed` reproduces a run. Processors are
    called with one row at a time (input_ids [1, n], the prompt's padding included, scores float32 [1, V]) for every
    node, so they must be functions of the text; stopping criteria likewise, with scores None, for every token. What one
    of them raises, the call raises.

    A model that transformers split over ranks (`from_pretrained(distributed_config=DistributedConfig(tp_size=2))` under
    torchrun) is decoded by all ranks together: each makes the same call, and seeds are the first rank's. With
    `tp_plan={"lm_head": "colwise"}` greedy rows are verified on vocabulary shards.

    Returns what `generate` would: ids int64 [B, prompt + new], or with `return_dict_in_generate` an object with
    `sequences`. NotImplementedError names what is not there: beams, scores and states in the output, a filled cache.
    """

    def decode(
        model: Any,
        input_ids: torch.Tensor,
        logits_processor: Any = None,
        stopping_criteria: Any = None,
        generation_config: Any = None,
        **model_kwargs: Any,
    ) -> Any:
        _refuse(model, generation_config, logits_processor, model_kwargs, len(input_ids))
        if streamer is not None and len(input_ids) > 1:
            raise ValueError(f"{_OP}: streamer: expected a batch of 1, got {len(input_ids)}")
        prompts = _prompts(input_ids, model_kwargs.get("attention_mask"))
        common = {"temperature": 0.0} | _stops(stopping_criteria)
        room = generation_config.max_length - input_ids.shape[1]
        texts: list[list[int]] = [[] for _ in prompts]
        with _lock, _Borrowed(model) as target:
            pages = sum(-(-(len(prompt) + room + num_drafts) // _PAGE) + 1 for prompt in prompts)
            config = EngineConfig(
                page_size=_PAGE, num_pages=pages, max_batch=len(prompts), num_drafts=num_drafts, prefix_cache=False,
                draft_pages=True,
            )  # fmt: skip
            engine = Engine(target, drafter, config, policy=policy)
            seeds = torch.tensor([int(torch.randint(2**62, ())) for _ in prompts], device=input_ids.device)
            if target.parallel is not None:
                seeds = target.parallel.same(seeds)
            rows: dict[int, int] = {}
            raised: list[Exception] = []
            for row, (prompt, seed) in enumerate(zip(prompts, seeds.tolist())):
                own = _of_row(logits_processor, row)
                law = _law(generation_config, own, input_ids[row].tolist(), len(prompt), raised)
                rows[engine.add(Request(prompt, max_tokens=room, seed=seed, **common | law))] = row

            def take(event: Event) -> None:
                """Tokens of one sequence, up to the first at which a criterion is met."""
                row = rows[event.request_id]
                for token in event.token_ids:
                    texts[row].append(token)
                    if streamer is not None:
                        streamer.put(torch.tensor([token]))
                    if _met(stopping_criteria, input_ids[row], texts[row]):
                        if event.result is None:
                            engine.abort(event.request_id)
                        return

            if streamer is not None:
                streamer.put(input_ids.cpu())  # as `generate` does: one that skips prompts drops the first it gets
            while engine.has_work:
                for event in engine.step():
                    if raised:
                        raise raised[0]
                    if event.result is not None and event.result.finish_reason in ("memory", "error"):
                        raise RuntimeError(
                            f"{_OP}: sequence {rows[event.request_id]}: {event.result.error or 'memory'}"
                        )
                    take(event)
        if streamer is not None:
            streamer.end()
        sequences = _padded(input_ids, texts, generation_config)
        if not generation_config.return_dict_in_generate:
            return sequences
        from transformers.generation.utils import GenerateDecoderOnlyOutput

        return GenerateDecoderOnlyOutput(sequences=sequences)

    return decode


class _Borrowed:
    """The model as a target for the time of one call: attention and flags are put back at the end."""

    def __init__(self, model: Any):
        self.model = model

    def __enter__(self) -> TransformersModel:
        from specdec_kernels.engine.model import ATTENTION

        model = self.model
        self.attention = model.config._attn_implementation
        if (
            getattr(model, _KEPT, None) is None or getattr(model, _KEPT).module is not model
        ):  # a copied model is another
            flags = [(parameter, parameter.requires_grad) for parameter in model.parameters()]
            try:
                setattr(model, _KEPT, TransformersModel(model, name=type(model).__name__, pack=False))
            finally:
                model.set_attn_implementation(self.attention)
                for parameter, flag in flags:
                    parameter.requires_grad_(flag)
        model.set_attn_implementation(ATTENTION)
        return getattr(model, _KEPT)

    def __exit__(self, *error: Any) -> None:
        self.model.set_attn_implementation(self.attention)


def _refuse(model: Any, config: Any, processors: Any, model_kwargs: dict[str, Any], batch: int) -> None:
    """NotImplementedError or ValueError for what this loop does not do; nothing is ignored in silence."""
    from transformers import PrefixConstrainedLogitsProcessor

    def missing(what: str) -> NotImplementedError:
        return NotImplementedError(f"{_OP}: {what} is not supported")

    if model.config.is_encoder_decoder:
        raise missing("an encoder-decoder model")
    if model.training:
        raise ValueError(f"{_OP}: model: expected model.eval(), got a model in training mode")
    if config.num_beams > 1:
        raise missing(f"num_beams={config.num_beams}")
    for name in ("output_scores", "output_logits", "output_attentions", "output_hidden_states"):
        if getattr(config, name, False) and config.return_dict_in_generate:
            raise missing(name)
    cache = model_kwargs.get("past_key_values")
    if cache is not None and cache.get_seq_length() > 0:
        raise missing("a past_key_values that holds text")
    if model_kwargs.get("inputs_embeds") is not None:
        raise missing("inputs_embeds")
    if batch > 1 and any(isinstance(p, PrefixConstrainedLogitsProcessor) for p in processors or ()):
        raise missing("prefix_allowed_tokens_fn with a batch above 1 (it asks for the row's number)")


def _prompts(input_ids: torch.Tensor, attention_mask: torch.Tensor | None) -> list[list[int]]:
    if attention_mask is None:
        return input_ids.tolist()
    kept = attention_mask.bool()
    if kept.shape != input_ids.shape:
        raise ValueError(f"{_OP}: attention_mask: expected {list(input_ids.shape)}, got {list(kept.shape)}")
    prompts = [row[mask].tolist() for row, mask in zip(input_ids, kept)]
    if not all(prompts):
        raise ValueError(f"{_OP}: attention_mask: expected a token in every row, got none in row {prompts.index([])}")
    return prompts


def _law(config: Any, processors: Any, padded: list[int], num_prompt: int, raised: list[Exception]) -> dict[str, Any]:
    """One row's law: our own filters where transformers' say the same, else its processors, called node by node with
    what they would get there: the padded row and the new tokens. raised: takes what they raise."""
    known = _filters(processors, padding=len(padded) - num_prompt)
    if known is not None:
        return ({"temperature": 1.0} if config.do_sample else {}) | known

    def process(text: list[int], row: torch.Tensor) -> torch.Tensor:
        try:
            return processors(torch.tensor([padded + text[num_prompt:]], device=row.device), row[None])[0]
        except Exception as error:
            raised.append(error)
            raise

    return {"logits_processor": process, "temperature": 1.0 if config.do_sample else 0.0}


def _of_row(processors: Any, row: int) -> Any:
    """The processors for one row alone: the repetition penalty of `generate` knows each row's padding."""
    from transformers import LogitsProcessorList, RepetitionPenaltyLogitsProcessor

    own = LogitsProcessorList()
    for processor in processors or ():
        skipped = getattr(processor, "prompt_ignore_length", None)
        if type(processor) is RepetitionPenaltyLogitsProcessor and isinstance(skipped, torch.Tensor):
            processor = RepetitionPenaltyLogitsProcessor(processor.penalty, skipped[row : row + 1])
        own.append(processor)
    return own


def _filters(processors: Sequence[Any], padding: int = 0) -> dict[str, Any] | None:
    """Request's arguments for these processors, None if they are not all known or not in the order we apply them.
    padding: of this row; ours count the tokens of the prompt alone."""
    from transformers import (
        MinPLogitsWarper,
        RepetitionPenaltyLogitsProcessor,
        TemperatureLogitsWarper,
        TopKLogitsWarper,
        TopPLogitsWarper,
    )

    order = [
        (RepetitionPenaltyLogitsProcessor, "repetition_penalty", "penalty"),
        (TemperatureLogitsWarper, "temperature", "temperature"),
        (TopKLogitsWarper, "top_k", "top_k"),
        (TopPLogitsWarper, "top_p", "top_p"),
        (MinPLogitsWarper, "min_p", "min_p"),
    ]
    found: dict[str, Any] = {}
    place = -1
    for processor in processors:
        index = next((i for i, (kind, _, _) in enumerate(order) if type(processor) is kind), -1)
        plain = getattr(processor, "min_tokens_to_keep", 1) == 1
        if index == 0:
            skipped = processor.prompt_ignore_length
            plain = (0 if skipped is None else int(skipped)) == padding
        if index <= place or not plain or getattr(processor, "filter_value", -float("inf")) != -float("inf"):
            return None
        found[order[index][1]], place = getattr(processor, order[index][2]), index
    if {"top_p", "min_p"} <= set(found):  # transformers measures the nucleus before min-p, we behind it
        return None
    return found


def _stops(criteria: Any) -> dict[str, Any]:
    """End tokens, which the engine looks for itself."""
    from transformers import EosTokenCriteria

    ids = [i for c in criteria or () if type(c) is EosTokenCriteria for i in c.eos_token_id.reshape(-1).tolist()]
    return {"stop_token_ids": tuple(ids), "ignore_eos": True}


def _met(criteria: Any, prompt: torch.Tensor, text: Sequence[int]) -> bool:
    """Whether a stopping criterion holds for this text. Length and end tokens are the engine's affair."""
    from transformers import EosTokenCriteria, MaxLengthCriteria

    asked = [c for c in criteria or () if type(c) not in (MaxLengthCriteria, EosTokenCriteria)]
    if not asked:
        return False
    ids = torch.cat([prompt, prompt.new_tensor(text)])[None]
    return any(bool(torch.as_tensor(criterion(ids, None)).any()) for criterion in asked)


def _padded(input_ids: torch.Tensor, texts: Sequence[Sequence[int]], config: Any) -> torch.Tensor:
    width = max(map(len, texts))
    pad = config._pad_token_tensor
    fill = 0 if pad is None else int(pad.reshape(-1)[0])
    out = torch.full((len(texts), width), fill, dtype=input_ids.dtype)
    for row, text in enumerate(texts):
        out[row, : len(text)] = torch.tensor(text, dtype=input_ids.dtype)
    return torch.cat([input_ids, out.to(input_ids.device)], dim=1)
