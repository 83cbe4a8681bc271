"""The claim scripts about the engine run, and their figures say what is so."""

from __future__ import annotations

import pytest

from tests.test_advisor_claims import run


def test_grouping(tmp_path, capsys):
    figures = run("grouping", tmp_path, capsys)
    used = figures["utilisation_64"]
    padded, ahead = used["sized trees, padded"], used["sized trees, look-ahead groups"]
    packed, grouped = used["sized trees, packed"], used["sized trees, a launch a group"]
    assert packed["slot util."] == 1.0
    assert padded["slot util."] < ahead["slot util."] <= grouped["slot util."] + 1e-9
    assert padded["tokens a node"] == pytest.approx(packed["tokens a node"], rel=0.1)  # rejection is not padding
    assert packed["x plain"] > ahead["x plain"] >= padded["x plain"]
    assert used["goodput trees, packed"]["x plain"] > max(1.0, packed["x plain"])
    few = figures["utilisation_4"]  # memory-bound: a launch a group reads the weights once a group
    assert few["sized trees, a launch a group"]["x plain"] < few["sized trees, padded"]["x plain"]
    queue = figures["queueing"]
    assert queue["goodput"]["P99 s"] < queue["plain, first come first served"]["P99 s"]
