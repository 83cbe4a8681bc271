"""Write docs/ops.md and the README's support matrix from the schema table and the sources.

`python -m docs.generate_ops` writes them, `--check` only compares (a test runs it).
"""

from __future__ import annotations

import inspect
import re
import sys
from pathlib import Path

import specdec_kernels
from specdec_kernels import _triton
from specdec_kernels._ops import SCHEMAS, supports, workspace_bounds

ROOT = Path(__file__).parents[1]
OPS_PAGE, README = ROOT / "docs" / "ops.md", ROOT / "README.md"
WITHOUT_TRITON = {"plan_tree_attention": "not needed: each program plans for itself"}
BEGIN, END = "<!-- support matrix: generated -->", "<!-- end of the support matrix -->"
ROOMS = {
    "tree": "build_tree chain_tree expand_tree rerank_tree pack_mask unpack_mask tree_from_mask",
    "attention": "tree_attention plan_tree_attention write_kv slot_mapping merge_attention",
    "sampling": "verify sample draft_topk draft_sample row_stats filter_rows residual_log_weights verify_probs",
    "hand-over": "truncate gather_accepted prepare_next",
    "kv": "commit_kv advance copy_pages",
    "batching": "plan_buckets pack_rows unpack_rows padding_stats",
}

METHODS = (  # of the field, for which no op exists yet
    "suffix decoding",
    "traversal verification",
    "block-diffusion drafts",
    "latent attention (MLA)",
    "recurrent state",
)


def ops_page() -> str:
    """docs/ops.md, whole."""
    lines = [
        "# torch.ops.specdec",
        "",
        "Generated from the table in `specdec_kernels/_ops.py` by `python -m docs.generate_ops`. Arguments marked",
        "`(x!)` are written; everything else stays bitwise unchanged. An argument that is written must not overlap",
        "another one. Call ops by keyword: their order is not that of the public function of the same name, whose",
        "docstring gives shapes, dtypes and meanings. `torch.ops.specdec_triton` has the same ops, served by Triton.",
        "",
    ]
    listed: set[str] = set()
    for room, names in ROOMS.items():
        lines += [f"## {room}", ""]
        for name in names.split():
            listed.add(name)
            arguments = [a.strip() for a in SCHEMAS[name].strip()[1:].split(") -> ()")[0].split(", ")]
            written = [a.split()[-1] for a in arguments if "!" in a]
            lines += [f"### `{name}`", "", "```", f"{name}(", *[f"    {a}," for a in arguments], ")", "```"]
            lines += ["", f"Writes {', '.join(f'`{w}`' for w in written)}.", ""]
            if bounds := workspace_bounds(name):
                given = ", ".join(f"{bound}=" for bound in bounds)
                optional = ", ".join(f"`{bound}`" for bound, needed in bounds.items() if not needed)
                note = f" ({optional} may be left out)" if optional else ""
                lines += [f'Workspace: `workspace_size("{name}", {given})` bytes{note}.', ""]
            if function := getattr(specdec_kernels, name, None):
                lines += [f"`specdec_kernels.{name}`:", "", "```text", inspect.getdoc(function) or "", "```", ""]
    missing = set(SCHEMAS) - listed
    if missing:
        raise SystemExit(f"ops without a room in docs/generate_ops.py: {sorted(missing)}")
    return "\n".join(lines)


def cuda_ops() -> set[str]:
    """Ops registered by some csrc/**/*_cuda.cu or *_sm90.cu."""
    text = "\n".join(p.read_text() for p in ROOT.glob("csrc/**/*.cu"))
    return {op for op in SCHEMAS if re.search(rf'"{op}"', text)}


def stale_build() -> list[str]:
    """Ops that some csrc/**/*_cpu*.cpp registers but the library here lacks: the matrix would call them "not yet"."""
    text = "\n".join(p.read_text() for p in ROOT.glob("csrc/**/*_cpu*.cpp"))
    return [op for op in SCHEMAS if re.search(rf'm\.impl\("{op}"', text) and not supports(op)]


def matrix() -> str:
    """The support matrix: op by backend, from what is compiled and what sources exist."""
    if behind := stale_build():
        raise SystemExit(f"docs.generate_ops: CPU library: expected {behind}, got a build without them (make build)")
    cuda = cuda_ops()
    lines = [BEGIN, "| op | CPU | CUDA | Triton |", "|---|---|---|---|"]
    for names in ROOMS.values():
        for op in names.split():
            gpu = ["not yet run on a GPU" if has else "not yet" for has in (op in cuda, op in _triton.OPS)]
            gpu[1] = WITHOUT_TRITON.get(op, gpu[1])
            lines.append(f"| `{op}` | {'yes' if supports(op) else 'not yet'} | {gpu[0]} | {gpu[1]} |")
    lines += [f"| {method} | not yet | not yet | not yet |" for method in METHODS]
    return "\n".join([*lines, END])


def readme() -> str:
    """README.md with a fresh matrix between its marks."""
    text = README.read_text()
    head, rest = text.split(BEGIN)
    return head + matrix() + rest.split(END)[1]


if __name__ == "__main__":
    pages = {OPS_PAGE: ops_page(), README: readme()}
    stale = [
        str(path.relative_to(ROOT)) for path, text in pages.items() if not path.exists() or path.read_text() != text
    ]
    if "--check" in sys.argv:
        sys.exit(f"stale: {stale} (python -m docs.generate_ops)" if stale else 0)
    for path, text in pages.items():
        path.write_text(text)
