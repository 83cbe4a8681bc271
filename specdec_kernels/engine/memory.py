"""The engine's KV memory: the caches, the arena that says who owns which page, the prefix cache over it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch

from specdec_kernels.engine.batch import KVCache, TargetModel, draft_page_size, share_pages
from specdec_kernels.engine.config import EngineConfig
from specdec_kernels.engine.drafters import Draft, Drafter
from specdec_kernels.engine.pages import Arena
from specdec_kernels.engine.prefix_cache import PrefixCache
from specdec_kernels.engine.request import RequestState
from specdec_kernels.kv import copy_pages, kv_handle

_GROWING = 256  # a drafter's rows of a request behind its text while a draft grows (EAGLE's default shape: 56)


class Memory:
    """Caches of the target and, if the drafter has KV of its own (`kv_shape`), of the drafter, in the same pages."""

    def __init__(self, model: TargetModel, drafter: Drafter, config: EngineConfig):
        self._drafter, self.config = drafter, config
        shape = getattr(drafter, "kv_shape", None)
        self.draft_cache: KVCache | None = None
        num_pages = config.num_pages
        if shape is None:
            self.cache = model.allocate_cache(num_pages, config.page_size)
        else:
            if config.draft_pages:
                size = draft_page_size(model.kv_shape, shape, config.page_size)
                rows = num_pages * config.page_size + config.max_batch * _GROWING
                num_pages += -(-rows // size) + config.max_batch
            self.cache, self.draft_cache = share_pages(model.kv_shape, shape, num_pages, config.page_size, model.device)
        self.arena = Arena(
            num_pages,
            config.page_size,
            draft_page_size=0 if self.draft_cache is None else self.draft_cache.page_size,
            target_floor=config.target_floor,
            draft_floor=config.draft_floor,
            on_free=self._poison if config.poison else None,
        )
        self.handle = kv_handle(self.cache.k, self.cache.v)
        self.prefixes = (
            PrefixCache(self.arena, lookahead=getattr(drafter, "lookahead", 0), keep_soft=config.soft_pages)
            if config.prefix_cache
            else None
        )

    def expect_known(self, drafter: Drafter) -> None:
        """ValueError if a request brings a drafter with KV of its own that the engine was not built with."""
        if getattr(drafter, "kv_shape", None) is not None and drafter is not self._drafter:
            raise ValueError(
                f"Request: drafter: expected one without KV of its own, or the engine's {self._drafter.name!r}, "
                f"got {drafter.name!r}"
            )

    def copy_page(self, src: int, dst: int) -> None:
        device = self.cache.k[0].device
        pair = torch.tensor([[src], [dst]], dtype=torch.int32, device=device)
        copy_pages(self.handle, None, pair[0], pair[1])

    def keep(self, state: RequestState, draft: Draft, before: int, nodes: Sequence[int]) -> None:
        """Behind a step that accepted `nodes` of a draft whose root was at position `before`: tell the prefix cache of
        full pages, and leave to it, as SOFT, those that the rejected part of the draft's first chain fills.

            rows       ... | L: root  a  b | x  y  z |       a, b accepted, x, y, z rejected; page size 3
            SOFT page                      | x  y  z |       key: the text up to b, then x y z
        Where the request goes on in the page (say z's page began with b), that page is copied.
        """
        cache, size = self.prefixes, self.arena.page_size
        if cache is None or state.cursor is None:
            return
        cache.extend(state.cursor, state.tokens, state.context_len, state.pages)
        if not cache.keep_soft or state.request.temperature <= 1e-5:
            return  # a greedy text never takes the way that was rejected
        chain = next((i for i, parent in enumerate(draft.parents) if parent != i), len(draft))
        first, last = state.context_len // size, (before + 1 + chain) // size
        if last <= first or state.cursor.depth != first or list(nodes) != list(range(len(nodes))):
            return
        soft: list[int] = []
        kept = self.arena.pages_for(state.context_len)
        if kept > first:
            if not self.arena.grow(soft, size, free_only=True):
                return
            self.copy_page(state.pages[first], soft[0])
        soft += state.pages[kept:last]
        del state.pages[kept:last]
        cache.retain(state.cursor, [*state.tokens[: before + 1], *draft.token_ids[:chain]], soft)

    def disown(self, state: RequestState, all_of_it: bool) -> None:
        """Tell the prefix cache nothing of a request's step; `all_of_it`: and let it forget what it was told before."""
        if all_of_it and self.prefixes is not None and state.cursor is not None:
            self.prefixes.forget(state.cursor)
        state.cursor = None

    def check(self, states: Iterable[RequestState]) -> None:
        """RuntimeError unless every page is where exactly its owners say."""
        self.arena.check([pages for state in states for pages in (state.pages, state.draft_pages)])
        if self.prefixes is not None:
            self.prefixes.check()

    def _poison(self, pages: Sequence[int]) -> None:
        index = torch.tensor(pages, device=self.cache.k[0].device)
        caches: list[Any] = [self.cache] if self.draft_cache is None else [self.cache, self.draft_cache]
        for cache in caches:
            for tensor in (*cache.k, *cache.v):
                tensor[index] = float("nan")
