"""Prefix cache: a tree of whole KV pages, keyed by the tokens from the start of the text.

A node is one page; its key is the page's tokens, its path from the root the whole text up to there, because KV at a
position is a function of every token before it. Verified text is COMMITTED. What speculation computed but did not keep
(rejected drafts, tokens behind a stop) may be retained as SOFT: taken first when pages run out, and reused only by a
request whose own tokens spell the whole path. See docs/engine.md for when that is right and when it helps.

    root -- "the cat sat" -- " on the mat" (COMMITTED)
                          \\-- " on the hat" (SOFT: drafted and rejected, complete)
"""

from __future__ import annotations

import heapq
import itertools
import weakref
from collections.abc import Hashable, Sequence
from typing import NamedTuple

from specdec_kernels.engine.pages import Arena, PageState

Namespace = Hashable


class _Node:
    __slots__ = ("__weakref__", "children", "key", "page", "parent", "stamp", "tree", "used")

    def __init__(self, tree: _Tree, parent: _Node | None, key: tuple[int, ...], page: int):
        self.tree, self.parent, self.key, self.page = tree, parent, key, page
        self.children: dict[tuple[int, ...], _Node] = {}
        self.used = 0  # logical time of the last use
        self.stamp = -1  # number of its latest entry in the eviction queue


class _Tree:
    """One namespace: KV of equal tokens in different namespaces is different. Its root lives as long as a page of it or
    a request's cursor."""

    __slots__ = ("alive",)

    def __init__(self) -> None:
        self.alive = True


class Cursor:
    """How far a request's own pages are in the tree: `depth` full pages, the last of which is `node`."""

    __slots__ = ("depth", "node")

    def __init__(self, node: _Node, depth: int):
        self.node, self.depth = node, depth


class Match(NamedTuple):
    """pages: shared with the caller, who releases them; num_tokens: covered by them; num_soft: of those, tokens from
    SOFT pages; num_dropped: matched tokens given up by `drop_last`; cursor: for `extend` and `retain`."""

    pages: list[int]
    num_tokens: int
    num_soft: int
    num_dropped: int
    cursor: Cursor


class PrefixCache:
    """Keeps pages of `arena` (target tenant) for requests to come.

    lookahead: tokens beyond a page that its content depends on. 0 for the target's KV; 1 where an EAGLE-type drafter's
    rows lie in the same pages (row i is computed from token i + 1): keys then take in the successor, so that a hit
    needs no recomputation. drop_last is the other way to be right with such drafters: give up the last matched page.
    keep_soft: retain rejected pages as SOFT.
    """

    def __init__(self, arena: Arena, *, lookahead: int = 0, keep_soft: bool = True, drop_last: bool = False):
        self.arena, self.lookahead, self.keep_soft, self.drop_last = arena, lookahead, keep_soft, drop_last
        self._roots: weakref.WeakValueDictionary[Namespace, _Node] = weakref.WeakValueDictionary()
        self._nodes: dict[int, _Node] = {}  # by page
        self._queue: list[tuple[int, int, int, _Node]] = []  # (class, last use, stamp, node): may be out of date
        self._clock = itertools.count(1)
        self._stamps = itertools.count()
        arena.evictor = self

    def __len__(self) -> int:
        """Pages in the tree, owned or not."""
        return len(self._nodes)

    # ---- look-up and insertion

    def match(self, tokens: Sequence[int], namespace: Namespace = ()) -> Match:
        """The longest cached run of whole pages that starts `tokens` and leaves at least one token to compute. Its
        pages get the caller as an owner; SOFT ones among them are COMMITTED from then on."""
        node = root = self._root(namespace)
        path: list[_Node] = []
        size = self.arena.page_size
        while (len(path) + 1) * size < len(tokens):
            key = self._key(tokens, len(path))
            child = None if key is None else node.children.get(key)
            if child is None:
                break
            path.append(child)
            node = child
        dropped = size if self.drop_last and path else 0
        if dropped:
            path.pop()
        soft = 0
        for node in path:
            self.arena.share(node.page)
            soft += size * self._promote(node)
        node = path[-1] if path else root
        return Match([n.page for n in path], len(path) * size, soft, dropped, Cursor(node, len(path)))

    def extend(self, cursor: Cursor, tokens: Sequence[int], num_tokens: int, pages: list[int]) -> None:
        """Take in the full pages of a running request behind its cursor.

        tokens: its verified text; num_tokens: how many of them have complete KV; pages: its page list, of which it is
        an owner. Where the tree has a page of the same path already, the request's own is given back and that one
        shared instead.
        """
        if not cursor.node.tree.alive:
            return
        while (cursor.depth + 1) * self.arena.page_size <= num_tokens:
            key = self._key(tokens, cursor.depth)
            if key is None:
                return
            page = pages[cursor.depth]
            child = cursor.node.children.get(key)
            if child is None:
                child = self._add(cursor.node, key, page, PageState.COMMITTED)
            elif child.page != page:
                self.arena.share(child.page)
                self._promote(child)
                pages[cursor.depth] = child.page
                self.arena.release(page)
            child.used = next(self._clock)
            cursor.node, cursor.depth = child, cursor.depth + 1

    def retain(self, cursor: Cursor, tokens: Sequence[int], pages: Sequence[int]) -> int:
        """Keep pages that speculation computed and the request does not go on with, as SOFT; returns how many.

        tokens: the whole path, the committed text and the drafts behind it; pages: those behind the cursor's, each
        complete, written by the target in a verification in which every row saw exactly its own path. The caller
        hands over its ownership of all of them, of those that are not kept as well.
        """
        node, kept = cursor.node, 0
        usable = self.keep_soft and node.tree.alive
        if self.lookahead and cursor.depth:  # the cursor's own page has the verified successor in its key
            successors = tokens[cursor.depth * self.arena.page_size :][: self.lookahead]
            usable = usable and node.key[-self.lookahead :] == tuple(successors)
        for i, page in enumerate(pages):
            depth = cursor.depth + i
            key = self._key(tokens, depth) if usable and (depth + 1) * self.arena.page_size <= len(tokens) else None
            usable = key is not None
            if key is not None:
                child = node.children.get(key)
                if child is None:
                    child = self._add(node, key, page, PageState.SOFT)
                    kept += 1
                node = child
        for page in reversed(pages):
            self.arena.release(page)
        return kept

    def start(self, namespace: Namespace = ()) -> Cursor:
        """A cursor at the start of a text."""
        return Cursor(self._root(namespace), 0)

    def forget(self, cursor: Cursor) -> int:
        """Drop the pages of a running text that turned out bad: those up to its cursor that nobody else owns, and what
        hangs on them; returns how many. A page shared with another request stays: that one meets the same fault. The
        cursor is void then."""
        node, top = cursor.node, None
        while node.parent is not None and self.arena.owners(node.page) == 1:
            top, node = node, node.parent
        if top is None or not top.tree.alive:
            return 0
        del node.children[top.key]
        dropped = [top]
        for old in dropped:
            dropped += old.children.values()
            old.stamp = -1  # its entries in the eviction queue are void
            del self._nodes[old.page]
            self.arena.forget(old.page)
        self._offer(node)
        return len(dropped)

    def flush(self) -> int:
        """Forget everything (the target's weights changed); returns how many pages. Pages of running requests stay
        theirs, but are not kept when they end."""
        count = len(self._nodes)
        for root in self._roots.values():
            root.tree.alive = False
        pages = list(self._nodes)
        self._roots.clear()
        self._nodes, self._queue = {}, []
        for page in pages:
            self.arena.forget(page)
        return count

    def _root(self, namespace: Namespace) -> _Node:
        root = self._roots.get(namespace)
        if root is None:
            root = self._roots[namespace] = _Node(_Tree(), None, (), -1)
        return root

    def _key(self, tokens: Sequence[int], depth: int) -> tuple[int, ...] | None:
        """Tokens that page `depth` adds to its path; None if they are not all known."""
        size, ahead = self.arena.page_size, self.lookahead
        end = (depth + 1) * size + ahead
        return tuple(tokens[depth * size + ahead if depth else 0 : end]) if end <= len(tokens) else None

    def _add(self, parent: _Node, key: tuple[int, ...], page: int, state: PageState) -> _Node:
        node = _Node(parent.tree, parent, key, page)
        parent.children[key] = self._nodes[page] = node
        node.used = next(self._clock)
        self.arena.keep(page, state)
        return node

    def _promote(self, node: _Node) -> bool:
        """Mark as used by verified text; True if the page was SOFT."""
        node.used = next(self._clock)
        was_soft = self.arena.kept_as(node.page) == PageState.SOFT
        if was_soft:
            self.arena.keep(node.page, PageState.COMMITTED)
        return was_soft

    # ---- eviction: SOFT before COMMITTED, least recently used first, children before parents

    def on_idle(self, page: int) -> None:
        node = self._nodes[page]
        node.used = next(self._clock)
        self._offer(node)

    def evict(self, count: int, soft_only: bool = False) -> int:
        freed = 0
        while freed < count and self._queue:
            group, _, stamp, node = self._queue[0]
            if stamp != node.stamp or node.children or self.arena.owners(node.page):
                heapq.heappop(self._queue)
                continue
            if soft_only and group:
                break
            heapq.heappop(self._queue)
            freed += 1
            assert node.parent is not None
            del node.parent.children[node.key], self._nodes[node.page]
            self.arena.forget(node.page, evicted=True)
            self._offer(node.parent)
        return freed

    def _offer(self, node: _Node) -> None:
        """Queue a page for eviction if nothing needs it: no owner, no child."""
        if node.parent is None or node.children or self.arena.owners(node.page):
            return
        node.stamp = next(self._stamps)
        group = int(self.arena.kept_as(node.page) == PageState.COMMITTED)
        heapq.heappush(self._queue, (group, node.used, node.stamp, node))
        if len(self._queue) > 4 * len(self._nodes) + 64:  # mostly entries out of date
            self._queue = [entry for entry in self._queue if entry[2] == entry[3].stamp]
            heapq.heapify(self._queue)

    def check(self) -> None:
        """Raise RuntimeError unless tree and arena agree, and no page hangs on a parent that could go before it."""
        for page, node in self._nodes.items():
            if node.page != page or node.parent is None or node.parent.children.get(node.key) is not node:
                raise RuntimeError(f"PrefixCache: page {page} is not where the tree says")
            kept = self.arena.kept_as(page)
            if kept not in (PageState.SOFT, PageState.COMMITTED):
                raise RuntimeError(f"PrefixCache: page {page} is in the tree, but not kept")
            parent = node.parent.page
            if parent < 0:
                continue
            if self.arena.owners(page) and not self.arena.owners(parent):
                raise RuntimeError(f"PrefixCache: page {page} has an owner that does not own its parent {parent}")
            if kept == PageState.COMMITTED and self.arena.kept_as(parent) == PageState.SOFT:
                raise RuntimeError(f"PrefixCache: COMMITTED page {page} under SOFT page {parent}")
