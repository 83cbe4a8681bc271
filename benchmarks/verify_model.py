"""What `verify` should take on a GPU, from bytes and latency alone: `python -m benchmarks.verify_model` writes
docs/verify_on_gpu.md.

Written before any run on a GPU; benchmarks/on_gpu.py puts its figures beside measured ones. The floor is one read of
the logits that the question needs (all target rows and, for drawn drafts, all draft rows) at the memory's bandwidth.
Model of the kernels of csrc/sampling: a block of 256 threads keeps 3 loads of 16 bytes a thread on their way, an SM
holds one (for its registers); a row is read twice (maximum, then mass: from L2 where the rows in work fit it). The last
token is a race (csrc/sampling/race_cuda.cuh): one pass more over its row for the maxima of groups, one load a thread on
its way, beside chains of loads (the block of the argmax, a few rings). No filters, no log-probabilities.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

PAGE = Path(__file__).resolve().parents[1] / "docs" / "verify_on_gpu.md"
SHAPES = [(batch, nodes) for nodes in (6, 8, 64) for batch in (1, 8, 64)]  # chains of 5 and 7 drafts, trees of 64 nodes
VOCABULARIES = (32_000, 128_256, 151_936, 262_144)
RACE_LOADS = 8  # one after the other: the argmax's block is read in 4; two rings of a target and a draft logit
EAGER_ROWS = 4  # a multiprocessor: verify_cuda.cu computes so many laws at once, or only those along the path


@dataclass(frozen=True)
class Device:
    """An H200 as its data sheet has it; latencies are assumptions."""

    bandwidth: float = 4.8e12
    l2_bytes: float = 50e6
    multiprocessors: int = 132
    memory_latency: float = 0.8e-6
    l2_latency: float = 0.35e-6
    launch: float = 4e-6


@dataclass(frozen=True)
class Prediction:
    """Bytes from memory and seconds of one call; `form` is what `form="auto"` takes."""

    form: str
    bytes: float
    seconds: float
    floor_bytes: float
    floor_seconds: float


def predict(batch: int, nodes: int, vocab: int, *, drawn: bool, visited: float = 4.5, element: int = 2,
            device: Device = Device()) -> Prediction:  # fmt: skip
    """A batch of trees of `nodes` rows; drawn: drafts have draft rows (chains); visited: rows along the path."""
    row, in_flight = vocab * element, 3 * 16 * 256
    first, again = row * device.memory_latency / in_flight, row * device.l2_latency / in_flight  # one block, one row
    race, chain = 3 * again, RACE_LOADS * device.l2_latency  # a third of the loads on their way
    rows = batch * nodes + (batch * (nodes - 1) if drawn else 0)
    floor = rows * row
    resident = device.multiprocessors
    if batch * nodes * (2 if drawn else 1) <= EAGER_ROWS * device.multiprocessors:
        fits = min(resident, rows) * row <= device.l2_bytes
        read = floor * (1 if fits else 2) + batch * row * (2 if drawn else 1) * (0 if fits else 1)
        waves = -(-rows // resident)
        last = race / min(16, max(1, resident // batch)) + chain
        seconds = max(read / device.bandwidth, waves * (first + again) + last) + 2 * device.launch
        return Prediction("eager", read, seconds, floor, floor / device.bandwidth)
    path = min(visited, nodes)
    read = batch * row * (2 * path - 1 if drawn else path)
    waves = -(-batch // resident)
    walk = (2 * path - 1 if drawn else path) * (first + again) + race + chain
    return Prediction("lazy", read, max(read / device.bandwidth, waves * walk) + device.launch, floor,
                      floor / device.bandwidth)  # fmt: skip


def table() -> str:
    """Markdown: chains with draft rows, trees of deterministic drafts; bfloat16."""
    lines = [
        "| B | rows | V | form | read MB | predicted us | floor MB | floor us |",
        "|---|---|---|---|---|---|---|---|",
    ]
    for batch, nodes in SHAPES:
        for vocab in VOCABULARIES:
            p = predict(batch, nodes, vocab, drawn=nodes < 64)
            lines.append(f"| {batch} | {nodes} | {vocab} | {p.form} | {p.bytes / 1e6:.1f} | {p.seconds * 1e6:.0f} "
                         f"| {p.floor_bytes / 1e6:.1f} | {p.floor_seconds * 1e6:.1f} |")  # fmt: skip
    return "\n".join(lines)


def page() -> str:
    """The page, whole."""
    device = Device()
    return f"""# What `verify` should cost on a GPU

Written by `python -m benchmarks.verify_model` before any run on a GPU: a prediction, not a measurement. Chains of 5 and
7 drafts drawn from draft rows (6 and 8 target rows a request), and trees of 64 nodes with deterministic drafts;
bfloat16 logits, no filters, no log-probabilities. `benchmarks/on_gpu.py` writes the same figures beside what it
measures.

- **floor**: one read of all target rows (and draft rows) at {device.bandwidth / 1e12:g} TB/s (an H200).
- **read MB**: what the kernels take from memory. Below the floor where the lazy form leaves rows unread (it visits
  about 4.5 of a tree's), above it where the rows in work do not fit the L2 cache of {device.l2_bytes / 1e6:.0f} MB.
- **predicted us**: a block of 256 threads keeps 12 KiB on their way and an SM has one block, so a row takes its length
  over 12 KiB times the latency, assumed: {device.memory_latency * 1e6:g} us from memory,
  {device.l2_latency * 1e6:g} us from L2. The last token is drawn by a race: a pass from L2 over its row for the groups'
  maxima with a third of those loads on their way (shared by up to 16 blocks when eager), and {RACE_LOADS} loads
  one after the other. A launch takes {device.launch * 1e6:g} us.

{table()}

Latency decides nearly everywhere: a row is one block's, which reads some 15 GB/s. What the model says to do next: let
several blocks share a row where rows are few, bring a second block onto an SM (128 registers a thread), and keep the
groups' maxima of the first read, so that the race needs no pass.
"""


if __name__ == "__main__":
    PAGE.write_text(page())
