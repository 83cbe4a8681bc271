"""The law of a row in the reference: filters against their definitions, edge rows, residual weights."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from python_ref import sampling, sampling_rules


def test_filters_match_the_definition_on_all_subsets():
    """kept_ids against an independent statement of each filter, over a grid of parameters and tied logits."""
    rows = [
        np.log([0.4, 0.3, 0.15, 0.1, 0.05]),
        np.array([1.0, 2, 2, 0, 2]),
        np.zeros(5),
        np.array([3, -np.inf, 1, 1, 0.0]),
    ]
    for row, k, top_p, min_p, temperature in itertools.product(
        rows, (0, 1, 2, 3, 5, 9), (0.0, 0.5, 0.79, 1.0), (0.0, 0.2, 1.0), (0.5, 1.0, 2.0)
    ):
        kept = sampling.kept_ids(row, sampling.Parameters(temperature, k, top_p, min_p))
        prob = np.exp((row - row.max()) / temperature)
        prob /= prob.sum()
        ranked = sorted((t for t in range(5) if prob[t] > 0), key=lambda t: (-row[t], t))
        if min_p > 0:
            ranked = [t for t in ranked if prob[t] >= min(min_p, 1) * prob.max() * (1 - 1e-12)]
        if 0 < k < 5:
            ranked = ranked[:k]
        if top_p < 1:
            total = sum(prob[t] for t in ranked)
            size = next(
                (n for n in range(1, len(ranked)) if sum(prob[t] for t in ranked[:n]) >= top_p * total), len(ranked)
            )
            ranked = ranked[: max(1, size)]
        assert kept.tolist() == ranked, (row, k, top_p, min_p, temperature)
        assert len(kept) >= 1


@pytest.mark.parametrize(
    ("probs", "parameters", "right"),
    [
        ([0.4, 0.3, 0.3, 0], dict(top_k=2), [4 / 7, 3 / 7, 0, 0]),
        ([0.40, 0.30, 0.15, 0.10, 0.05], dict(top_k=3, top_p=0.8), [4 / 7, 3 / 7, 0, 0, 0]),
        ([0.5, 0.3, 0.2], dict(top_k=1, top_p=0.8), [1, 0, 0]),
        ([0.6, 0.25, 0.1, 0.05], dict(min_p=0.2), [12 / 17, 5 / 17, 0, 0]),
        ([0.35, 0.25, 0.2, 0.05, 0.03] + [0.01] * 12, dict(top_k=4, top_p=0.82), [0.4375, 0.3125, 0.25] + [0] * 14),
    ],
)
def test_filtered_laws(probs, parameters, right):
    with np.errstate(divide="ignore"):
        found, flags = sampling.target_law(np.log(np.array(probs)), sampling.Parameters(**parameters))
    np.testing.assert_allclose(found, right, atol=1e-6)
    assert flags == 0


def test_edge_rows():
    inf, nan = np.inf, np.nan
    assert sampling.target_law([nan, 1, nan])[0].tolist() == [0, 1, 0]
    assert sampling.target_law([nan, 1, nan])[1] == sampling.NAN_LOGIT
    assert sampling.target_law([nan, nan])[1] == sampling.NAN_LOGIT | sampling.DEAD_ROW
    assert sampling.target_law([-inf, -inf])[0].tolist() == [1, 0]
    assert sampling.target_law([inf, 1, inf])[0].tolist() == [0.5, 0, 0.5]
    law_, flags = sampling.target_law([5, 5, 1], sampling.Parameters(temperature=-1.0))
    assert law_.tolist() == [1, 0, 0]
    assert flags == sampling.PARAMETER


def test_residual_log_weights_match_exact_differences():
    with np.errstate(divide="ignore"):
        found = sampling.residual_log_weights(np.log([0.5, 0.3, 0.2, 0.0]), np.log([0.25, 0.0, 0.4, 0.3]), np.log(1.5))
    np.testing.assert_allclose(np.exp(found), [0.125, 0.3, 0.0, 0.0], atol=1e-12)
    # near equality: log(-expm1(d)) keeps what log1p(-exp(d)) loses in short formats
    np.testing.assert_allclose(sampling.residual_log_weights([0.0], [-1e-7], 0.0), [-16.1181], atol=1e-4)


def test_canonical_chain_vector():
    """V = 8, temperature .8: the published numbers of the token rule and of block verification on the path (1, 3)."""
    inf, t = np.inf, sampling.Parameters(temperature=0.8)
    target = [[2, 1, 0, -1, 0.5, -2, -inf, 1.5], [0, 3, -1, 2, 0.25, -4, 1, -inf], [1] * 8]
    draft = [[1, 2, 0, -1, 0.5, -2, 0, -inf], [0, 1, -1, 3, 0.25, -4, -inf, 1]]
    p, q = [sampling.target_law(row, t)[0] for row in target], [sampling.target_law(row, t)[0] for row in draft]
    right = [
        (1, -1.985948918, -0.491205678, 0.224306190, {0: 0.542241943, 7: 0.457758057}, 0.560159099),
        (3, -1.608477546, -0.204351358, 0.245581555, {1: 0.916776632, 6: 0.083223368}, 0.689181618),
    ]
    for row, (x, log_p, log_q, accept, residual, mass) in enumerate(right):
        assert np.log(p[row][x]) == pytest.approx(log_p, abs=1e-9)
        assert np.log(q[row][x]) == pytest.approx(log_q, abs=1e-9)
        assert p[row][x] / q[row][x] == pytest.approx(accept, abs=1e-9)
        rest = sampling_rules.positive_part(p[row] - q[row])
        assert rest.sum() == pytest.approx(mass, abs=1e-9)
        np.testing.assert_allclose(rest / rest.sum(), [residual.get(v, 0) for v in range(8)], atol=1e-9)
    tree = sampling_rules.Tree([-1, 0, 1], [0, 1, 3], lambda node: p[node], lambda node: q[node])
    rho, h, residuals, _ = sampling_rules.block_ratios(tree)
    np.testing.assert_allclose(rho, [1, 0.224306190, 0.055085463], atol=1e-9)
    np.testing.assert_allclose(h, [1, 0.116901006, 0.055085463], atol=1e-9)
    assert residuals[1].sum() == pytest.approx(0.102683150, abs=1e-9)
