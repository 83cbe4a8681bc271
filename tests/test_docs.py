"""What the troubleshooting page quotes is what the package says."""

from __future__ import annotations

from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(p.read_text() for p in [ROOT / "setup.py", *sorted((ROOT / "specdec_kernels").rglob("*.py"))])


@pytest.mark.parametrize(
    "words",
    [
        "is not built; this build has: ",
        "does not load into torch ",
        "(built for the stable ABI of torch >= 2.11): ",
        "backend: native on cuda has code for ",
        "setup: CUDA_HOME: expected one directory, got ",
        "setup: CUDA_HOME: expected a CUDA toolkit with bin/nvcc, got ",
        "_C not built for this Python; the ops library does not need it",
        "needs the package ",
        "SPECDEC_CHECK",
        "SPECDEC_LOG",
        "SPECDEC_BUILD_CUDA",
    ],
)
def test_quoted_messages_are_the_packages_own(words: str):
    assert words in PAGE
    assert words in SOURCES
