"""Write docs/ops.md from the schema table: `python -m docs.generate_ops [--check]`."""

from __future__ import annotations

import re
import sys
from pathlib import Path

from specdec_kernels._ops import SCHEMAS

TARGET = Path(__file__).with_name("ops.md")
ROOMS = {
    "tree": "build_tree chain_tree expand_tree rerank_tree pack_mask unpack_mask tree_from_mask",
    "attention": "tree_attention plan_tree_attention write_kv slot_mapping merge_attention",
    "sampling": "verify sample draft_topk draft_sample row_stats filter_rows residual_log_weights verify_probs",
    "hand-over": "truncate gather_accepted prepare_next",
    "kv": "commit_kv advance copy_pages",
    "batching": "plan_buckets pack_rows unpack_rows padding_stats",
}


def render() -> str:
    """The whole page."""
    lines = [
        "# torch.ops.specdec",
        "",
        "Generated from the table in `specdec_kernels/_ops.py` by `python -m docs.generate_ops`. Arguments marked",
        "`(x!)` are written; everything else stays bitwise unchanged. Shapes and meanings: the public function of the",
        "same name. `torch.ops.specdec_triton` has the same ops, served by Triton.",
        "",
    ]
    listed: set[str] = set()
    for room, names in ROOMS.items():
        lines += [f"## {room}", ""]
        for name in names.split():
            listed.add(name)
            arguments = [a.strip() for a in re.split(r",(?![^(\[]*[)\]])", SCHEMAS[name].strip()[1:].split(") -> ")[0])]
            written = [a.split()[-1] for a in arguments if "!" in a]
            lines += [f"### `{name}`", "", "```", f"{name}(", *[f"    {a}," for a in arguments], ")", "```"]
            lines += ["", f"Writes {', '.join(f'`{w}`' for w in written)}.", ""]
    missing = set(SCHEMAS) - listed
    if missing:
        raise SystemExit(f"ops without a room in docs/generate_ops.py: {sorted(missing)}")
    return "\n".join(lines)


if __name__ == "__main__":
    page = render()
    if "--check" in sys.argv:
        sys.exit(0 if TARGET.exists() and TARGET.read_text() == page else "docs/ops.md is stale")
    TARGET.write_text(page)
