"""KV pages: which are free, who owns the others. Pages are handed out and taken back, never counted twice."""

from __future__ import annotations


class PagePool:
    """`num_pages` pages of `page_size` tokens. A request owns `ceil(context_len / page_size)` pages between steps and
    borrows more for the tree of a step."""

    def __init__(self, num_pages: int, page_size: int):
        self.num_pages, self.page_size = num_pages, page_size
        self._free = list(range(num_pages - 1, -1, -1))
        self._is_free = bytearray(b"\x01" * num_pages)

    @property
    def num_free(self) -> int:
        return len(self._free)

    def pages_for(self, num_tokens: int) -> int:
        """Pages that hold `num_tokens` tokens."""
        return -(-num_tokens // self.page_size)

    def grow(self, pages: list[int], num_tokens: int) -> bool:
        """Extend `pages` so that they hold `num_tokens` tokens; False (and nothing changed) if too few are free."""
        missing = self.pages_for(num_tokens) - len(pages)
        if missing > len(self._free):
            return False
        for _ in range(missing):
            page = self._free.pop()
            self._is_free[page] = 0
            pages.append(page)
        return True

    def shrink(self, pages: list[int], num_tokens: int) -> None:
        """Give back the pages of `pages` that lie behind the first `num_tokens` tokens."""
        keep = self.pages_for(num_tokens)
        while len(pages) > keep:
            page = pages.pop()
            if self._is_free[page]:
                raise RuntimeError(f"PagePool: page {page} was returned twice")
            self._is_free[page] = 1
            self._free.append(page)

    def check(self, owned: list[list[int]]) -> None:
        """Raise RuntimeError unless every page is either free or owned by exactly one of `owned`."""
        held = [page for pages in owned for page in pages]
        if len(held) != len(set(held)) or len(held) + len(self._free) != self.num_pages:
            raise RuntimeError(f"PagePool: {len(held)} pages held, {len(self._free)} free, {self.num_pages} in all")
        if any(self._is_free[page] for page in held):
            raise RuntimeError("PagePool: a page is both free and owned")
