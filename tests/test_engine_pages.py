"""The page arena: tenants, floors, borrowing, and what its checks find."""

from __future__ import annotations

import random

import pytest

from specdec_kernels.engine.pages import Arena, PageState, Tenant

DRAFT = Tenant.DRAFT


def test_pages_grow_and_shrink():
    arena = Arena(4, 16)
    pages: list[int] = []
    assert arena.grow(pages, 33)
    assert (len(pages), arena.num_free, arena.active) == (3, 1, [3, 0])
    assert not arena.grow(pages, 65)
    assert len(pages) == 3  # nothing changed
    arena.check([pages])
    arena.shrink(pages, 16)
    assert (len(pages), arena.num_free) == (1, 3)
    arena.shrink(pages, 0)
    arena.check([])
    assert arena.num_free == arena.num_unowned == 4


def test_a_page_has_as_many_owners_as_share_it():
    arena = Arena(2, 4)
    mine: list[int] = []
    arena.grow(mine, 4)
    yours = list(mine)
    arena.share(yours[0])
    arena.check([mine, yours])
    arena.release(mine.pop())
    assert arena.state(yours[0]) == PageState.ACTIVE
    arena.release(yours[0])
    assert arena.state(yours[0]) == PageState.FREE
    with pytest.raises(RuntimeError, match="returned twice"):
        arena.release(yours[0])
    with pytest.raises(RuntimeError, match="free and cannot be shared"):
        arena.share(yours[0])


def test_checks_find_lost_and_doubly_owned_pages():
    arena = Arena(4, 4)
    pages: list[int] = []
    arena.grow(pages, 8)
    for wrong in ([pages[:1]], [pages, pages], [[pages[0], pages[0]]], []):
        with pytest.raises(RuntimeError, match="Arena"):
            arena.check(wrong)
    arena._free.append(pages[0])
    with pytest.raises(RuntimeError, match="free list"):
        arena.check([pages])


def test_floors_cannot_be_borrowed():
    arena = Arena(10, 4, draft_page_size=8, target_floor=3, draft_floor=2)
    target: list[int] = []
    draft: list[int] = []
    assert arena.available(Tenant.TARGET) == 8
    assert arena.available(DRAFT) == 7
    assert not arena.grow(target, 9 * 4)
    assert arena.grow(target, 8 * 4)
    assert arena.grow(draft, 2 * 8, DRAFT)  # its floor
    assert not arena.grow(draft, 3 * 8, DRAFT)
    arena.check([target, draft])
    arena.shrink(target, 0)
    assert arena.grow(draft, 7 * 8, DRAFT)
    assert not arena.grow(draft, 8 * 8, DRAFT)
    assert arena.grow(target, 3 * 4)
    arena.check([target, draft])


def test_borrowed_pages_come_back_and_lending_reopens_late():
    arena = Arena(10, 4, draft_page_size=4, draft_floor=1, reopen=4)
    drafts: list[list[int]] = [[], []]
    asked = []

    def reclaim(count: int) -> int:
        asked.append(count)
        given = 0
        while given < count:
            victim = max(drafts, key=len)
            given += 1
            arena.release(victim.pop())
        return given

    arena.reclaim = reclaim
    target: list[int] = []
    assert arena.grow(drafts[0], 16, DRAFT)
    assert arena.grow(drafts[1], 8, DRAFT)
    assert arena.available() == 9
    assert arena.grow(target, 7 * 4)
    assert asked == [3]
    assert (arena.active, arena.reclaimed) == ([7, 3], 3)
    arena.shrink(target, 4 * 4)  # three pages free again: fewer than `reopen`
    assert not arena.grow(drafts[0], 4 * 4, DRAFT)
    arena.shrink(target, 3 * 4)
    assert arena.grow(drafts[0], 4 * 4, DRAFT)
    assert not arena.grow(target, 10 * 4)
    arena.check([target, *drafts])


def test_free_pages_are_reported_once():
    freed: list[int] = []
    arena = Arena(3, 1, on_free=freed.extend)
    pages: list[int] = []
    arena.grow(pages, 3)
    arena.shrink(pages, 0)
    assert sorted(freed) == [0, 1, 2]


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (dict(num_pages=0, page_size=1), "num_pages: expected an int >= 1, got 0"),
        (dict(num_pages=4, page_size=1, draft_floor=-1), "draft_floor"),
        (dict(num_pages=4, page_size=1, target_floor=3, draft_floor=2), r"floors within 4 pages, got 3 \+ 2"),
    ],
)
def test_bad_arguments_are_named(arguments: dict, message: str):
    with pytest.raises(ValueError, match=message):
        Arena(**arguments)


@pytest.mark.parametrize("seed", range(5))
def test_random_traffic_of_both_tenants(seed: int):
    rng = random.Random(seed)
    arena = Arena(24, 4, draft_page_size=8, target_floor=6, draft_floor=4, reopen=rng.randint(1, 8))
    owners: list[tuple[Tenant, list[int]]] = []

    def reclaim(count: int) -> int:
        given = 0
        for tenant, pages in owners:
            while tenant == DRAFT and pages and given < count:
                arena.release(pages.pop())
                given += 1
        return given

    arena.reclaim = reclaim
    for _ in range(2000):
        choice = rng.random()
        if choice < 0.4 or not owners:
            owners.append((rng.choice(list(Tenant)), []))
        tenant, pages = rng.choice(owners)
        if choice < 0.8:
            available = arena.available(tenant)
            wanted = len(pages) + rng.randint(0, 6)
            size = arena.page_size if tenant == Tenant.TARGET else arena.draft_page_size
            before = len(pages)
            done = arena.grow(pages, wanted * size, tenant)
            assert done == (wanted - before <= available or wanted == before)
            assert len(pages) == (wanted if done else before)
        else:
            arena.shrink(pages, 0, tenant)
        arena.check([pages for _, pages in owners])
        assert arena.active[DRAFT] <= 18
        assert arena.active[Tenant.TARGET] <= 20
    for tenant, pages in owners:
        arena.shrink(pages, 0, tenant)
    assert arena.num_free == 24
