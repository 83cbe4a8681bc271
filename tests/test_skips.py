"""Every reason for which a test of this suite may be skipped stands in tests/skips.json, other machines' too."""

from __future__ import annotations

import ast
import json
import re
from pathlib import Path

import pytest

HERE = Path(__file__).parent


def reasons(source: str) -> list[str]:
    """Texts given to pytest.skip, or as reason= to skipif and importorskip; "{}" for what an f-string fills in."""
    found = []
    for node in ast.walk(ast.parse(source)):
        if not isinstance(node, ast.Call):
            continue
        name = node.func.attr if isinstance(node.func, ast.Attribute) else ""
        given = [k.value for k in node.keywords if k.arg == "reason"] + (node.args[:1] if name == "skip" else [])
        if name == "importorskip" and not given:
            package = node.args[0]
            assert isinstance(package, ast.Constant)
            found.append(f"could not import '{package.value}': No module named '{package.value}'")
        elif name in ("skip", "skipif", "importorskip"):
            found += [text(value) for value in given]
    return found


def text(value: ast.expr) -> str:
    if isinstance(value, ast.JoinedStr):
        return "".join(text(part) for part in value.values)
    return str(value.value) if isinstance(value, ast.Constant) else "{}"


def listed(reason: str) -> bool:
    """Whether some pattern covers it, whatever fills its gaps."""
    return any(re.fullmatch(pattern, reason.replace("{}", fill)) for pattern in PATTERNS for fill in ("ptx", "0.33.0"))


PATTERNS = json.loads((HERE / "skips.json").read_text())


@pytest.mark.parametrize("path", sorted(HERE.glob("*.py")), ids=lambda path: path.name)
def test_reasons_are_listed(path: Path):
    assert [reason for reason in reasons(path.read_text()) if not listed(reason)] == []


def test_a_reason_that_is_not_listed_is_found():
    code = "pytest.skip('no flux capacitor')\n@pytest.mark.skipif(x, reason=f'no {tool} here')\ndef f(): pass\n"
    assert reasons(code + "y = pytest.importorskip('z')\n") == [
        "no flux capacitor", "no {} here", "could not import 'z': No module named 'z'",
    ]  # fmt: skip
    assert not listed("no flux capacitor")
    assert listed("long suite: pytest --long")
