"""Philox4x32-10 in plain integers: the textbook generator that csrc/common/rng.h must equal word for word."""

MASK = 0xFFFFFFFF
DRAFT, ACCEPT, EMIT, PLAN, BLOCK, RACE = range(6)  # purposes


def philox4x32_10(counter: tuple[int, int, int, int], key: tuple[int, int]) -> tuple[int, int, int, int]:
    """Ten rounds of Philox4x32 (Salmon et al., SC'11)."""
    c0, c1, c2, c3 = counter
    k0, k1 = key
    for _ in range(10):
        product0, product1 = 0xD2511F53 * c0, 0xCD9E8D57 * c2
        c0, c1, c2, c3 = (product1 >> 32) ^ c1 ^ k0, product1 & MASK, (product0 >> 32) ^ c3 ^ k1, product0 & MASK
        k0, k1 = (k0 + 0x9E3779B9) & MASK, (k1 + 0xBB67AE85) & MASK
    return c0, c1, c2, c3


def draw(seed: int, position: int, purpose: int, block: int, salt: int = 0) -> tuple[int, int, int, int]:
    """Words for tokens 4*block .. 4*block+3 (or for trial `block`) of a request's `position` and `purpose`."""
    seed, position = seed % 2**64, position % 2**64
    counter = (block & MASK, position & MASK, ((position >> 32) << 8 | purpose) & MASK, salt & MASK)
    return philox4x32_10(counter, (seed & MASK, seed >> 32))


def coin(word: int) -> float:
    """Midpoint of the word's 2^-32 cell: strictly between 0 and 1, exact in float64."""
    return (word + 0.5) * 2.0**-32
