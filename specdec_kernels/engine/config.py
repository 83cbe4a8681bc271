"""What an engine is built with, beside its model and drafter."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class EngineConfig:
    """`num_pages` pages of `page_size` tokens hold the KV of at most `max_batch` running requests and of a drafter that
    has KV of its own (`target_floor`, `draft_floor`: pages the other cannot take; draft_pages: such a drafter gets as
    many more as it needs where the target's text fills all of `num_pages`). A step computes at most `max_step_tokens`
    tokens, with at most `num_drafts` per request.

    prefix_cache: keep KV for later requests; soft_pages: that of rejected drafts too, for requests that sample.
    draft_timeout_s: a drafter that takes longer three times in a row is given up. graph_sizes: token counts at which
    decoding steps run as CUDA graphs. check: verify page ownership each step; poison: fill freed pages with NaN.
    """

    page_size: int = 16
    num_pages: int = 2048
    max_batch: int = 8
    max_step_tokens: int = 512
    num_drafts: int = 15
    check: bool = False
    prefix_cache: bool = True
    soft_pages: bool = True
    target_floor: int = 0
    draft_floor: int = 0
    draft_timeout_s: float | None = None
    graph_sizes: tuple[int, ...] = ()
    poison: bool = False
    draft_pages: bool = False

    def validate(self) -> None:
        for name, least in (
            ("page_size", 1), ("num_pages", 1), ("max_batch", 1), ("max_step_tokens", 1), ("num_drafts", 0),
        ):  # fmt: skip
            value = getattr(self, name)
            if not isinstance(value, int) or value < least:
                raise ValueError(f"EngineConfig: {name}: expected an int >= {least}, got {value!r}")
