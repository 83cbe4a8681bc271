"""The reference proves itself: exact laws by enumeration in rationals, with negative controls that must show a bias."""

from __future__ import annotations

import functools
import random
from fractions import Fraction

import numpy as np
import pytest

from python_ref import sampling, sampling_rules
from python_ref.sampling_dice import enumerate_law
from python_ref.sampling_rules import Tree


def random_law(rng: random.Random, vocab: int, zeros: bool = True) -> np.ndarray:
    weights = [Fraction(rng.randint(0 if zeros else 1, 9)) for _ in range(vocab)]
    weights[rng.randrange(vocab)] += 1
    return np.array([weight / sum(weights) for weight in weights], dtype=object)


def law(*values: str | int) -> np.ndarray:
    return np.array([Fraction(value) for value in values], dtype=object)


class Model:
    """A random context-dependent pair of laws over `vocab` ids."""

    def __init__(self, seed: int, vocab: int, stationary: tuple | None = None):
        self.seed, self.vocab, self.stationary = seed, vocab, stationary

    @functools.cache  # noqa: B019 - a handful of models a test
    def laws(self, prefix: tuple[int, ...]) -> tuple[np.ndarray, np.ndarray]:
        if self.stationary:
            return self.stationary
        rng = random.Random(f"{self.seed} {prefix}")
        return random_law(rng, self.vocab), random_law(rng, self.vocab)

    def joint(self, length: int) -> dict[tuple[int, ...], Fraction]:
        out = {(): Fraction(1)}
        for _ in range(length):
            out = {
                (*prefix, token): mass * p
                for prefix, mass in out.items()
                for token, p in enumerate(self.laws(prefix)[0])
                if mass * p > 0
            }
        return out


def draw_tree(model: Model, widths: tuple[int, ...], dice, deterministic=frozenset(), replacement=False) -> Tree:
    """Draft level by level: `widths[d]` siblings below every node of depth d; `deterministic` depths take the top."""
    parents, tokens, prefixes, depths = [-1], [0], [()], [0]
    node = 0
    while node < len(parents):
        depth, prefix = depths[node], prefixes[node]
        if depth < len(widths):
            q = model.laws(prefix)[1]
            if depth in deterministic:
                drawn = sorted(range(len(q)), key=lambda t: (-q[t], t))[: widths[depth]]
            else:
                drawn = sampling_rules.draw_siblings(q, widths[depth], dice, replacement)
            for token in drawn:
                parents.append(node)
                tokens.append(token)
                prefixes.append((*prefix, token))
                depths.append(depth + 1)
        node += 1
    return Tree(
        parents,
        tokens,
        lambda node: model.laws(prefixes[node])[0],
        lambda node: None if depths[node] in deterministic else model.laws(prefixes[node])[1],
    )


def emitted_law(model: Model, widths, verify, length: int, deterministic=frozenset(), replacement=False):
    """Law of the first `length` tokens: one speculative step, then plain decoding for what is missing."""

    def run(dice) -> tuple[int, ...]:
        tokens = verify(draw_tree(model, widths, dice, deterministic, replacement), dice).tokens
        while len(tokens) < length:
            tokens.append(dice.pick(model.laws(tuple(tokens))[0], depth=len(tokens)))
        return tuple(tokens[:length])

    return enumerate_law(run)


def support(found: dict) -> dict:
    return {key: value for key, value in found.items() if value > 0}


CHAINS = [(3, (1,), 2), (3, (1, 1), 3), (4, (1, 1), 2), (2, (1, 1, 1), 4)]


@pytest.mark.parametrize(("vocab", "widths", "length"), CHAINS)
@pytest.mark.parametrize("verify", [sampling_rules.verify_tree, sampling_rules.verify_block], ids=["chain", "block"])
def test_chains_are_exactly_lossless(verify, vocab, widths, length):
    for seed in range(3):
        model = Model(seed, vocab)
        assert support(emitted_law(model, widths, verify, length)) == model.joint(length)


@pytest.mark.parametrize(
    ("vocab", "widths", "length", "deterministic"),
    [
        (5, (2,), 1, ()),
        (5, (3,), 1, ()),
        (3, (2, 1), 2, ()),
        (3, (2, 2), 2, ()),
        (4, (3,), 2, {0}),
        (3, (2, 2), 3, {0, 1}),
        (3, (2, 2), 2, {0}),
        (3, (2, 2), 2, {1}),
    ],
)
@pytest.mark.parametrize("form", ["siblings_scalar", "siblings_recursive"])
def test_trees_are_exactly_lossless(form, vocab, widths, length, deterministic):
    rule = getattr(sampling_rules, form)
    for seed in range(2):
        model = Model(seed, vocab)
        verify = functools.partial(sampling_rules.verify_tree, siblings=rule)
        assert support(emitted_law(model, widths, verify, length, frozenset(deterministic))) == model.joint(length)


@pytest.mark.parametrize("replacement", [False, True], ids=["without", "with"])
def test_scalar_form_equals_the_full_recursion_term_by_term(replacement):
    rng = random.Random(11)
    for _ in range(40 if replacement else 100):
        vocab = rng.randint(2, 5)
        p, q, k = random_law(rng, vocab), random_law(rng, vocab), rng.randint(1, 4)
        k = min(k, sum(x > 0 for x in q)) if not replacement else k

        def run(dice, rule, p=p, q=q, k=k):
            tokens = sampling_rules.draw_siblings(q, k, dice, replacement)
            nodes = list(range(1, len(tokens) + 1))
            hit, rest, _ = rule(p, q, tokens, dice=dice, nodes=nodes, depth=1, replacement=replacement)
            return tuple(tokens), hit, tokens[hit] if hit is not None else dice.pick(rest, depth=0)

        outcomes = [
            enumerate_law(functools.partial(run, rule=rule))
            for rule in (sampling_rules.siblings_scalar, sampling_rules.siblings_recursive)
        ]
        assert support(outcomes[0]) == support(outcomes[1])
        marginal = {}
        for (_, _, token), weight in outcomes[0].items():
            marginal[token] = marginal.get(token, 0) + weight
        assert support(marginal) == {token: x for token, x in enumerate(p) if x > 0}


def test_worked_vector_of_the_scalar_form():
    p, q = law("1/5", "1/2", "3/10"), law("3/5", "3/10", "1/10")

    class Refuse:
        ratios: list[Fraction] = []  # noqa: RUF012

        def coin(self, ratio, **key):
            self.ratios.append(ratio)
            return False

    hit, rest, flags = sampling_rules.siblings_scalar(p, q, [0, 1], dice=Refuse(), nodes=[1, 2], depth=1)
    assert Refuse.ratios == [Fraction(1, 3), Fraction(2, 3)]
    assert hit is None
    assert flags == 0
    assert list(rest / rest.sum()) == [0, 0, 1]


@pytest.mark.parametrize(
    ("widths", "deterministic", "replacement", "right"),
    [((2,), (), False, "9/10"), ((2,), (), True, "19/25"), ((2,), {0}, False, "7/10"), ((1,), (), False, "3/5")],
)
def test_acceptance_of_the_right_rules(widths, deterministic, replacement, right):
    """Case 2 of the survey: how often some child is accepted; the law is p under every rule."""
    model = Model(0, 3, (law("1/5", "1/2", "3/10"), law("3/5", "3/10", "1/10")))

    def run(dice):
        tree = draw_tree(model, widths, dice, frozenset(deterministic), replacement)
        out = sampling_rules.verify_tree(tree, dice, replacement=replacement)
        return len(out.nodes) > 1, out.tokens[0]

    found = enumerate_law(run)
    assert sum(weight for (accepted, _), weight in found.items() if accepted) == Fraction(right)
    for token, p in enumerate(model.laws(())[0]):
        assert sum(weight for (_, first), weight in found.items() if first == token) == p


def test_block_toy_accepts_more_than_the_chain_rule():
    model = Model(0, 2, (law("1/3", "2/3"), law("2/3", "1/3")))

    def accepted(verify):
        found = enumerate_law(lambda dice: len(verify(draw_tree(model, (1, 1), dice), dice).nodes) - 1)
        return sum(count * weight for count, weight in found.items())

    assert accepted(sampling_rules.verify_tree) == Fraction(10, 9)
    assert accepted(sampling_rules.verify_block) == Fraction(11, 9)


def test_block_never_accepts_less():
    for seed in range(6):
        model = Model(seed, 3)
        mean = [
            sum(
                (len(nodes) - 1) * weight
                for nodes, weight in enumerate_law(
                    lambda dice, verify=verify, model=model: tuple(verify(draw_tree(model, (1, 1), dice), dice).nodes)
                ).items()
            )
            for verify in (sampling_rules.verify_tree, sampling_rules.verify_block)
        ]
        assert mean[1] >= mean[0]


def test_coupled_emits_the_plain_decoders_law_whatever_is_drafted():
    model = Model(4, 3)
    tree = Tree([-1, 0, 0, 1], [0, 2, 0, 1], lambda node: model.laws(((), (2,), (0,), (2, 1))[node])[0], lambda _: None)

    def run(dice):
        tokens = sampling_rules.verify_coupled(tree, dice).tokens
        while len(tokens) < 3:
            tokens.append(dice.pick(model.laws(tuple(tokens))[0], depth=len(tokens)))
        return tuple(tokens[:3])

    assert support(enumerate_law(run)) == model.joint(3)


# ---- negative controls: each known wrong rule must show its bias in the same enumeration


def same_laws_rule(target, draft, tokens, *, dice, nodes, depth, replacement=False):
    """Every sibling against the unchanged p and q, then max(p - q, 0)."""
    for trial, token in enumerate(tokens):
        if dice.coin(target[token] / draft[token], node=nodes[trial], depth=depth):
            return trial, target, 0
    return None, sampling_rules.positive_part(target - draft), 0


def zero_only_rule(target, draft, tokens, *, dice, nodes, depth, replacement=False):
    """A rejection only removes the rejected token from p."""
    p, q = np.array(target), np.array(draft)
    for trial, token in enumerate(tokens):
        if dice.coin(p[token] / q[token] if q[token] > 0 else 0, node=nodes[trial], depth=depth):
            return trial, target, 0
        p[token], q[token] = Fraction(0), Fraction(0)
        p, q = p / p.sum(), q / q.sum()
    return None, p, 0


def not_renormalised_rule(target, draft, tokens, *, dice, nodes, depth, replacement=False):
    """The second sibling is judged with q as it was before the first was taken out."""
    r, d = np.array(target), np.array(draft)
    for trial, token in enumerate(tokens):
        if dice.coin(r[token] / d[token], node=nodes[trial], depth=depth):
            return trial, target, 0
        rest = sampling_rules.positive_part(r - d)
        r = rest / rest.sum()
        d[token] = Fraction(0)
    return None, r, 0


def first_token(model, widths, rule, deterministic=frozenset(), replacement=False):
    verify = functools.partial(sampling_rules.verify_tree, siblings=rule)
    found = emitted_law(model, widths, verify, 1, deterministic, replacement)
    return [float(found.get((token,), 0)) for token in range(model.vocab)]


def test_controls_show_the_biases_of_the_survey():
    p3, q3 = law("1/5", "1/2", "3/10"), law("3/5", "3/10", "1/10")
    model3 = Model(0, 3, (p3, q3))
    np.testing.assert_allclose(first_token(model3, (2,), same_laws_rule), [0.2, 0.6, 0.2], atol=1e-12)
    np.testing.assert_allclose(
        first_token(model3, (2,), same_laws_rule, replacement=True), [0.28, 0.5, 0.22], atol=1e-12
    )
    p4, q4 = law("1/10", "1/5", "3/10", "2/5"), law("3/5", "1/5", "1/10", "1/10")
    model4 = Model(0, 4, (p4, q4))
    np.testing.assert_allclose(first_token(model4, (2,), zero_only_rule), [0.1, 0.311, 0.285, 0.304], atol=6e-4)
    np.testing.assert_allclose(first_token(model4, (2,), not_renormalised_rule), [0.1, 0.2, 0.319, 0.381], atol=6e-4)
    assert first_token(model4, (2,), sampling_rules.siblings_scalar) == [0.1, 0.2, 0.3, 0.4]


def test_control_pruning_by_the_drawn_tokens_own_law_is_biased():
    """Case 4: of two draws the larger q is kept and verified against q; keeping the first drawn is exact."""
    p, q = law("1/5", "1/2", "3/10"), law("3/5", "3/10", "1/10")

    def run(dice, keep):
        token = keep(sampling_rules.draw_siblings(q, 2, dice))
        tree = Tree([-1, 0], [0, token], lambda _: p, lambda _: q)
        return sampling_rules.verify_tree(tree, dice).tokens[0]

    biased = enumerate_law(functools.partial(run, keep=lambda drawn: max(drawn, key=lambda t: q[t])))
    np.testing.assert_allclose([float(biased[t]) for t in range(3)], [0.308, 0.384, 0.308], atol=5e-4)
    assert support(enumerate_law(functools.partial(run, keep=lambda drawn: drawn[0]))) == dict(enumerate(p))


def test_control_blanking_a_forbidden_id_is_biased():
    """p=(.5,.5,0), q uniform on 3: id 2 forbidden keeps its id (exact) or becomes -1 = never drafted (biased)."""
    p, q = law("1/2", "1/2", 0), law("1/4", "1/4", "1/2")
    p2, q2 = law("1/2", "1/2", 0), law("1/2", 0, "1/2")

    def run(dice, p, q, blank):
        token = dice.pick(q, depth=0)
        tree = Tree([-1, 0], [0, -1 if blank and token == 2 else token], lambda _: p, lambda _: q)
        return sampling_rules.verify_tree(tree, dice).tokens[0]

    assert support(enumerate_law(lambda dice: run(dice, p, q, False))) == {0: Fraction(1, 2), 1: Fraction(1, 2)}
    assert support(enumerate_law(lambda dice: run(dice, p2, q2, False))) == {0: Fraction(1, 2), 1: Fraction(1, 2)}
    assert support(enumerate_law(lambda dice: run(dice, p2, q2, True))) == {0: Fraction(3, 4), 1: Fraction(1, 4)}


def test_control_duplicates_with_one_cumulative_coin():
    """Case 3: a duplicate adds no mass; adding it twice gives (.6, .286, .114)."""
    p = law("3/10", "1/2", "1/5")
    tree = Tree([-1, 0, 0], [0, 0, 0], lambda _: p, lambda _: None)
    found = enumerate_law(lambda dice: sampling_rules.verify_tree(tree, dice).tokens[0])
    assert [found[t] for t in range(3)] == list(p)
    assert sampling_rules.siblings_one_hot(p, [0, 0], dice=_First(), node=1, depth=1)[2] == sampling.SIBLINGS

    def wrong(dice):
        hit = dice.bucket([p[0], p[0]], node=1, depth=1)
        return 0 if hit is not None else dice.pick(np.array([Fraction(0), p[1], p[2]]), depth=0)

    found = enumerate_law(wrong)
    np.testing.assert_allclose([float(found[t]) for t in range(3)], [0.6, 0.286, 0.114], atol=5e-4)


class _First:
    def bucket(self, masses, **key):
        return 0
