"""One arena of KV pages for two tenants, the target's KV and a drafter's: who owns what, who lends, who gives back.

A page is a span of memory. The target puts `page_size` tokens into it, a drafter with smaller rows `draft_page_size`.
Nothing is reserved: a tenant takes what it needs, may borrow beyond its floor, and the target gets borrowed pages back.

    |<- target_floor ->|            either tenant            |<- draft_floor ->|
    | target ACTIVE ...| COMMITTED | SOFT |   FREE  ...      | draft ACTIVE    |
                         ^ kept by the prefix cache, no owner: taken when FREE runs out, SOFT first
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Iterable, Sequence
from typing import Protocol


class PageState(enum.IntEnum):
    """FREE: no content; ACTIVE: at least one owner; COMMITTED, SOFT: no owner, kept by the prefix cache (verified text;
    rejected or cut-off drafts)."""

    FREE = 0
    ACTIVE = 1
    COMMITTED = 2
    SOFT = 3


class Tenant(enum.IntEnum):
    TARGET = 0
    DRAFT = 1


class Evictor(Protocol):
    """The prefix cache, as the arena sees it."""

    def on_idle(self, page: int) -> None:
        """A kept page lost its last owner."""

    def evict(self, count: int, soft_only: bool = False) -> int:
        """Forget up to `count` kept pages without owners; returns how many."""


class Arena:
    """`num_pages` pages; `page_size`, `draft_page_size`: tokens a page holds for either tenant (0: no draft tenant).

    target_floor, draft_floor: pages the other tenant can never hold. A draft tenant above its floor is a borrower: it
    takes pages that nobody owns, while lending is open. `reclaim(count)`, set by the engine, is asked to drop borrowed
    draft pages when the target runs out; that closes lending until `reopen` pages are free or kept (default: an
    eighth), so that drafting is not switched on and off in turns.
    `on_free(pages)` is told of every page that becomes FREE (a debugging engine poisons it).
    """

    def __init__(
        self,
        num_pages: int,
        page_size: int,
        *,
        draft_page_size: int = 0,
        target_floor: int = 0,
        draft_floor: int = 0,
        reopen: int | None = None,
        on_free: Callable[[Sequence[int]], None] | None = None,
    ):
        for name, value, least in (
            ("num_pages", num_pages, 1), ("page_size", page_size, 1), ("draft_page_size", draft_page_size, 0),
            ("target_floor", target_floor, 0), ("draft_floor", draft_floor, 0),
        ):  # fmt: skip
            if not isinstance(value, int) or value < least:
                raise ValueError(f"Arena: {name}: expected an int >= {least}, got {value!r}")
        if target_floor + draft_floor > num_pages:
            raise ValueError(
                f"Arena: draft_floor: expected floors within {num_pages} pages, got {target_floor} + {draft_floor}"
            )
        self.num_pages, self.page_size, self.draft_page_size = num_pages, page_size, draft_page_size
        self.floors = (target_floor, draft_floor)
        self.reopen = max(1, num_pages // 8) if reopen is None else reopen
        self.on_free = on_free
        self.reclaim: Callable[[int], int] | None = None
        self.evictor: Evictor | None = None
        self.lending = True
        self.active = [0, 0]  # pages with owners, per tenant
        self.evicted = {PageState.SOFT: 0, PageState.COMMITTED: 0}
        self.reclaimed = 0
        self._free = list(range(num_pages - 1, -1, -1))
        self._owners = [0] * num_pages
        self._tenant = [Tenant.TARGET] * num_pages
        self._kept = [PageState.FREE] * num_pages  # FREE: the cache does not keep it

    # ---- looking

    @property
    def num_free(self) -> int:
        return len(self._free)

    @property
    def num_idle(self) -> int:
        """Kept pages without owners: they can be taken, at the price of what they hold."""
        return self.num_pages - len(self._free) - sum(self.active)

    @property
    def num_unowned(self) -> int:
        """FREE and kept pages together: all of them once no request is left."""
        return self.num_pages - sum(self.active)

    def state(self, page: int) -> PageState:
        return PageState.ACTIVE if self._owners[page] else self._kept[page]

    def owners(self, page: int) -> int:
        return self._owners[page]

    def kept_as(self, page: int) -> PageState:
        """COMMITTED or SOFT if the cache keeps the page, owners or not; else FREE."""
        return self._kept[page]

    def pages_in(self, state: PageState) -> list[int]:
        return [page for page in range(self.num_pages) if self.state(page) == state]

    def pages_for(self, num_tokens: int, tenant: Tenant = Tenant.TARGET) -> int:
        """Pages that hold `num_tokens` tokens of a tenant."""
        return -(-num_tokens // (self.page_size if tenant == Tenant.TARGET else self.draft_page_size))

    def available(self, tenant: Tenant = Tenant.TARGET) -> int:
        """Pages that the tenant could be given now."""
        other = Tenant(1 - tenant)
        room = self.num_pages - self.floors[other] - self.active[tenant]
        if tenant == Tenant.TARGET:
            return min(room, self.num_unowned + (self._borrowed if self.reclaim is not None else 0))
        own = max(0, self.floors[tenant] - self.active[tenant])
        return min(room, self.num_unowned if self._may_lend() else min(own, self.num_unowned))

    @property
    def _borrowed(self) -> int:
        return max(0, self.active[Tenant.DRAFT] - self.floors[Tenant.DRAFT])

    def _may_lend(self) -> bool:
        if not self.lending and self.num_unowned >= self.reopen:
            self.lending = True
        return self.lending

    # ---- taking and giving back

    def grow(
        self, pages: list[int], num_tokens: int, tenant: Tenant = Tenant.TARGET, *, free_only: bool = False
    ) -> bool:
        """Extend `pages` so that they hold `num_tokens` tokens; False (and nothing changed) if that cannot be had.
        free_only: FREE and SOFT pages only (what is wanted is a guess, not worth anyone's text)."""
        missing = self.pages_for(num_tokens, tenant) - len(pages)
        if missing <= 0:
            return True
        if not self._make_room(missing, tenant, free_only):
            return False
        pages.extend(self._take(tenant) for _ in range(missing))
        return True

    def shrink(self, pages: list[int], num_tokens: int, tenant: Tenant = Tenant.TARGET) -> None:
        """Give back the pages of `pages` that lie behind the first `num_tokens` tokens, last first."""
        keep = self.pages_for(num_tokens, tenant)
        while len(pages) > keep:
            self.release(pages.pop())

    def share(self, page: int) -> None:
        """One more owner for an ACTIVE or kept page."""
        if self.state(page) == PageState.FREE:
            raise RuntimeError(f"Arena: page {page} is free and cannot be shared")
        if self._owners[page] == 0:
            self.active[self._tenant[page]] += 1
        self._owners[page] += 1

    def release(self, page: int) -> None:
        """One owner less; without owners a page is kept by the cache or FREE."""
        if self._owners[page] <= 0:
            raise RuntimeError(f"Arena: page {page} was returned twice")
        self._owners[page] -= 1
        if self._owners[page] == 0:
            self.active[self._tenant[page]] -= 1
            if self._kept[page] == PageState.FREE:
                self._set_free(page)
            elif self.evictor is not None:
                self.evictor.on_idle(page)

    def keep(self, page: int, state: PageState) -> None:
        """The cache keeps an ACTIVE or kept page, as COMMITTED or SOFT, for when it has no owner."""
        if state not in self.evicted or self.state(page) == PageState.FREE:
            raise RuntimeError(f"Arena: page {page} cannot be kept as {state!r}")
        self._kept[page] = state

    def forget(self, page: int, evicted: bool = False) -> None:
        """The cache keeps the page no longer."""
        if evicted:
            self.evicted[self._kept[page]] += 1
        self._kept[page] = PageState.FREE
        if self._owners[page] == 0:
            self._set_free(page)

    def _take(self, tenant: Tenant) -> int:
        page = self._free.pop()
        self._owners[page], self._tenant[page] = 1, tenant
        self.active[tenant] += 1
        return page

    def _set_free(self, page: int) -> None:
        self._free.append(page)
        if self.on_free is not None:
            self.on_free([page])

    def _make_room(self, count: int, tenant: Tenant, free_only: bool) -> bool:
        """Have `count` pages FREE that this tenant may take; cheapest first: FREE, SOFT, COMMITTED, borrowed ones."""
        if count > self.available(tenant):
            return False
        missing = count - len(self._free)
        if missing > self.num_idle and self.reclaim is not None and not free_only:
            self.reclaimed += self.reclaim(missing - self.num_idle)
            self.lending = False
            missing = count - len(self._free)
        if missing > 0 and self.evictor is not None:
            self.evictor.evict(missing, free_only)
        return len(self._free) >= count

    # ---- debugging

    def check(self, owned: Iterable[Sequence[int]]) -> None:
        """Raise RuntimeError unless owners, states and counts agree with the page lists in `owned` (all there are)."""
        owners, active = [0] * self.num_pages, [0, 0]
        for pages in owned:
            for page in pages:
                active[self._tenant[page]] += not owners[page]
                owners[page] += 1
            if len(pages) != len(set(pages)):
                raise RuntimeError(f"Arena: an owner lists a page twice: {list(pages)}")
        if owners != self._owners:
            wrong = [(p, a, b) for p, (a, b) in enumerate(zip(owners, self._owners)) if a != b]
            raise RuntimeError(f"Arena: (page, owners listed, owners counted): {wrong[:8]}")
        free = {page for page, kept in enumerate(self._kept) if kept == PageState.FREE and not owners[page]}
        if len(self._free) != len(free) or free != set(self._free):
            raise RuntimeError("Arena: the free list does not match the pages' states")
        if active != self.active:
            raise RuntimeError(f"Arena: {active} pages active, {self.active} counted")
        if any(active[t] > self.num_pages - self.floors[1 - t] for t in Tenant):
            raise RuntimeError(f"Arena: {active} pages active against floors {self.floors}")
