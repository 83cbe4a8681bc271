"""The prefix cache alone: what hits, what is evicted first, what may never be found (cases PC-01 to PC-03)."""

from __future__ import annotations

import gc
import random

import pytest

from specdec_kernels.engine.pages import Arena, PageState
from specdec_kernels.engine.prefix_cache import PrefixCache


def setup(num_pages: int = 16, page_size: int = 4, **options) -> tuple[Arena, PrefixCache]:
    arena = Arena(num_pages, page_size)
    return arena, PrefixCache(arena, **options)


def run_text(arena: Arena, cache: PrefixCache, tokens: list[int], namespace=(), known: int | None = None) -> list[int]:
    """A request that computes KV for `known` of its tokens (default: all) and ends; returns the pages it used."""
    hit = cache.match(tokens, namespace)
    pages, known = list(hit.pages), len(tokens) if known is None else known
    assert arena.grow(pages, known)
    cache.extend(hit.cursor, tokens, known, pages)
    used = list(pages)
    arena.shrink(pages, 0)
    cache.check()
    arena.check([])
    return used


def hit_tokens(arena: Arena, cache: PrefixCache, tokens: list[int], namespace=()) -> int:
    hit = cache.match(tokens, namespace)
    arena.shrink(list(hit.pages), 0)
    return hit.num_tokens


@pytest.mark.parametrize(
    ("options", "expected"), [({}, (12, 8)), ({"lookahead": 1}, (12, 8)), ({"drop_last": True}, (8, 4))]
)
def test_PC_02_at_most_one_page_is_computed_again(options: dict, expected: tuple[int, int]):
    text = list(range(13))
    arena, cache = setup(**options)
    run_text(arena, cache, text)
    assert (hit_tokens(arena, cache, text), hit_tokens(arena, cache, text[:12])) == expected
    assert hit_tokens(arena, cache, text + [99]) == expected[0]
    assert cache.match(text).num_dropped == (4 if "drop_last" in options else 0)


def test_PC_02_successor_keys_tell_what_follows_a_page():
    """Row 7 of an EAGLE-type cache was computed from token 8: with another token 8 it is another row."""
    text, other = list(range(13)), [*range(8), 50, 51, 52, 53, 54]
    for lookahead, expected in ((0, 8), (1, 4)):
        arena, cache = setup(lookahead=lookahead)
        run_text(arena, cache, text)
        assert hit_tokens(arena, cache, other) == expected


def test_PC_03_eviction_goes_tail_first_and_a_page_answers_to_its_new_key_only():
    for seed in range(200):
        rng = random.Random(seed)
        arena, cache = setup(num_pages=3)
        text = list(range(13))
        run_text(arena, cache, text[: 4 * rng.randint(1, 2)])
        used = run_text(arena, cache, text[:12])
        other = [70, 71, 72, 73, 74]
        (recycled,) = run_text(arena, cache, other, known=4)
        assert recycled == used[2]
        assert hit_tokens(arena, cache, text) == 8
        assert hit_tokens(arena, cache, other) == 4
        assert arena.evicted[PageState.COMMITTED] == 1


def test_least_recently_used_goes_first():
    arena, cache = setup(num_pages=3)
    texts = [[10 * i + j for j in range(5)] for i in range(3)]
    for text in texts:
        run_text(arena, cache, text, known=4)
    hit_tokens(arena, cache, texts[0])
    run_text(arena, cache, [80, 81, 82, 83, 84], known=4)
    assert [hit_tokens(arena, cache, text) for text in texts] == [4, 0, 4]


def test_PC_01_rejected_drafts_are_found_by_their_own_path_only():
    """Page 4, L = 6, window = root r and drafts x, y, z at positions 6..9, all rejected; the true next token is w."""
    six, r, x, y, z, w = [1, 2, 3, 4, 5, 6], 7, 8, 9, 10, 11
    for keep_soft in (False, True):
        arena, cache = setup(keep_soft=keep_soft)
        hit = cache.match([*six, r])
        pages = list(hit.pages)
        arena.grow(pages, 10)
        cache.extend(hit.cursor, [*six, r, w], 7, pages)  # behind the step: r's row is verified, w's is not there
        copy: list[int] = []
        arena.grow(copy, 4)
        assert cache.retain(hit.cursor, [*six, r, x, y, z], copy) == keep_soft
        arena.shrink(pages, 7)
        assert hit_tokens(arena, cache, [*six, r, w, 0]) == 4
        soft = cache.match([*six, r, x, 0])
        assert (soft.num_tokens, soft.num_soft) == ((8, 4) if keep_soft else (4, 0))
        arena.check([pages, soft.pages])
        arena.shrink(list(soft.pages), 0)
        arena.grow(pages, 8)
        cache.extend(hit.cursor, [*six, r, w, 12], 8, pages)  # w's row is there
        assert hit_tokens(arena, cache, [*six, r, w, 0]) == 8
        assert hit_tokens(arena, cache, [*six, r, x, 0]) == (8 if keep_soft else 4)
        cache.check()


def test_soft_pages_go_first_and_are_committed_by_use():
    arena, cache = setup(num_pages=6)
    old, text = [60, 61, 62, 63, 0], [1, 2, 3, 4]
    run_text(arena, cache, old, known=4)  # the oldest page of all, but COMMITTED
    hit = cache.match([*text, 0])
    pages = list(hit.pages)
    arena.grow(pages, 4)
    cache.extend(hit.cursor, text, 4, pages)
    for drafts in ([5, 6, 7, 8], [9, 10, 11, 12]):
        copy: list[int] = []
        arena.grow(copy, 4)
        cache.retain(hit.cursor, text + drafts, copy)
    assert len(arena.pages_in(PageState.SOFT)) == 2
    reused = cache.match([*text, 9, 10, 11, 12, 0])
    assert (reused.num_tokens, reused.num_soft) == (8, 4)
    arena.shrink(list(reused.pages), 0)
    arena.shrink(pages, 0)
    wanted: list[int] = []
    arena.grow(wanted, 3 * 4)
    assert dict(arena.evicted) == {PageState.SOFT: 1, PageState.COMMITTED: 0}
    assert hit_tokens(arena, cache, [*text, 5, 6, 7, 8, 0]) == 4
    assert hit_tokens(arena, cache, old) == 4
    guess: list[int] = []
    assert not arena.grow(guess, 4, free_only=True)  # a guess is not worth anyone's text
    assert arena.grow(guess, 4)
    cache.check()


def test_equal_paths_share_one_page():
    arena, cache = setup()
    text = list(range(9))
    requests = []
    for _ in range(2):  # both computed at once, before either was in the tree
        pages: list[int] = []
        arena.grow(pages, 9)
        requests.append((cache.start(), pages))
    for cursor, pages in requests:
        cache.extend(cursor, text, 9, pages)
    (_, a), (_, b) = requests
    assert a[:2] == b[:2]
    assert a[2] != b[2]
    arena.check([a, b])
    assert arena.num_unowned == 12


def test_flush_and_namespaces():
    arena, cache = setup()
    text = list(range(9))
    run_text(arena, cache, text, ("weights", 1))
    assert hit_tokens(arena, cache, text, ("weights", 2)) == 0
    running = cache.match(text, ("weights", 1))
    assert running.num_tokens == 8
    assert cache.flush() == 2
    assert hit_tokens(arena, cache, text, ("weights", 1)) == 0
    cache.extend(running.cursor, text, 8, list(running.pages))  # of the old weights: not taken in
    arena.shrink(list(running.pages), 0)
    assert (len(cache), arena.num_free) == (0, 16)


def test_a_namespace_is_forgotten_with_its_last_page_and_its_last_reader():
    """A salt a session: only those that still hold something are known."""
    arena, cache = setup()
    for session in range(50):
        run_text(arena, cache, list(range(9)), ("weights", str(session)))
    assert len(cache) <= 16
    assert 1 < len(cache._roots) <= 16 + 1  # of 50
    arena.evictor.evict(16)
    held = cache.start("held")
    hit_tokens(arena, cache, [1, 2, 3], "short")
    gc.disable()  # nobody has to look for cycles
    try:
        assert list(cache._roots) == ["held"]
        pages = []
        assert arena.grow(pages, 4)
        cache.extend(held, [1, 2, 3, 4, 5], 4, pages)
        arena.shrink(pages, 0)
        del held
        assert hit_tokens(arena, cache, [1, 2, 3, 4, 5], "held") == 4
        arena.evictor.evict(16)
        assert not cache._roots
    finally:
        gc.enable()


@pytest.mark.parametrize("lookahead", [0, 1])
def test_what_a_faulty_text_left_is_forgotten_but_for_what_others_own(lookahead: int):
    """A shared prompt of two pages; one text goes on with two more pages and a rejected one, and turns out bad."""
    arena, cache = setup(lookahead=lookahead)
    text = list(range(18))
    pages = run_text(arena, cache, text[:9])
    good, bad = cache.match([*text[:8], 99, 98]), cache.match(text)
    if lookahead:  # the second page's key has the successor in it
        assert (good.num_tokens, bad.num_tokens) == (4, 8)
    mine = list(bad.pages)
    assert arena.grow(mine, 16)
    cache.extend(bad.cursor, text, 16 + lookahead, mine)
    soft: list[int] = []
    assert arena.grow(soft, 4)
    cache.retain(bad.cursor, [*text[:17], 7, 7, 7, 7], soft)
    assert len(cache) == 5
    shared = 1 if lookahead else 2
    assert cache.forget(bad.cursor) == 5 - shared
    cache.check()
    arena.shrink(mine, 0)
    assert hit_tokens(arena, cache, text) == 4 * shared
    assert pages[0] == good.pages[0]
    arena.shrink(list(good.pages), 0)
    arena.check([])
    arena.evictor.evict(16)  # entries of what was forgotten are void
    cache.check()
    assert (len(cache), arena.num_free) == (0, 16)


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("lookahead", [0, 1, 2])
def test_random_texts_against_a_dictionary(page_size: int, lookahead: int):
    """Whatever hits was written for exactly these tokens; nothing is lost or owned twice; a request that fits gets
    its pages; without pressure, every text is found again in full."""
    rng = random.Random(page_size + 10 * lookahead)
    for num_pages in (12, 1500):
        arena, cache = setup(num_pages, page_size, lookahead=lookahead)
        content: dict[int, list[int]] = {}  # page -> the text up to its end, successors included
        known: set[tuple[int, ...]] = set()
        running: list[list] = []

        for _ in range(800):
            if len(running) < 3 and rng.random() < 0.5:
                tokens = [rng.randint(0, 2) for _ in range(rng.randint(1, 10))]
                hit = cache.match(tokens, "a")
                for i, page in enumerate(hit.pages):
                    assert content[page] == tokens[: (i + 1) * page_size + lookahead]
                if not any(arena.evicted.values()):
                    sizes = range(page_size, min(len(tokens), len(tokens) - lookahead + 1), page_size)
                    full = [size for size in sizes if tuple(tokens[: size + lookahead]) in known]
                    assert hit.num_tokens >= max(full, default=0)
                pages = list(hit.pages)
                if not arena.grow(pages, len(tokens)):
                    assert arena.pages_for(len(tokens)) - len(hit.pages) > arena.available()
                    arena.shrink(pages, 0)
                    continue
                running.append([tokens, pages, hit.cursor, hit.num_tokens])
            if not running:
                continue
            request = rng.choice(running)
            tokens, pages, cursor, done = request
            end = len(tokens) - 1
            drafts = [rng.randint(0, 2) for _ in range(rng.randint(0, 4))]
            if not arena.grow(pages, end + 1 + len(drafts)):
                arena.shrink(pages, 0)
                running.remove(request)
                continue
            accepted = rng.randint(0, len(drafts))
            path = tokens + drafts
            tokens += [*drafts[:accepted], rng.randint(0, 2)]
            for i in range(done // page_size, (len(tokens) - 1) // page_size):
                content[pages[i]] = tokens[: (i + 1) * page_size + lookahead]
            request[3] = len(tokens) - 1
            cache.extend(cursor, tokens, len(tokens) - 1, pages)
            for i in range(cursor.depth):  # by now the successors are known
                full = tokens[: (i + 1) * page_size + lookahead]
                assert content[pages[i]] == full[: len(content[pages[i]])]
                content[pages[i]] = full
            whole = (len(tokens) - 1) % page_size == 0  # else the first page would have to be copied
            if len(path) > len(tokens) and whole and cursor.depth == (len(tokens) - 1) // page_size:
                soft = pages[cursor.depth :]
                for i, page in enumerate(soft):
                    content[page] = path[: (cursor.depth + i + 1) * page_size + lookahead]
                del pages[cursor.depth :]
                cache.retain(cursor, path, soft)
            for i in range(cursor.depth):
                known.add(tuple(tokens[: (i + 1) * page_size + lookahead]))
            arena.shrink(pages, len(tokens) - 1)
            if rng.random() < 0.2 or len(tokens) > 30:
                arena.shrink(pages, 0)
                running.remove(request)
            arena.check([r[1] for r in running])
            cache.check()
        for request in running:
            arena.shrink(request[1], 0)
        assert arena.num_unowned == num_pages
        everything: list[int] = []
        assert arena.grow(everything, num_pages * page_size)  # SOFT and COMMITTED pages can all be had
        assert len(cache) == 0
