"""Speculative decoding in your own engine: from a paged KV cache to verified tokens, by `torch.ops.specdec` alone.

The engine below is yours: a toy transformer, a page table, prompt lookup as drafter. One packed forward pass a step
verifies a tree a request. Run it: `python -m docs.embed_in_your_engine`.
"""

import torch

import specdec_kernels  # noqa: F401  registers torch.ops.specdec

ops = torch.ops.specdec
V, HQ, HKV, D, LAYERS, PAGE_SIZE, PAGES_EACH = 32, 4, 2, 64, 2, 16, 32  # vocabulary, heads, head_dim, cache


def ints(values: list) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


class YourEngine:
    """Weights and a paged cache; `texts` are the requests, of which the last token (the root) has no KV yet."""

    def __init__(self, prompts: list[list[int]], temperature: list[float]):
        torch.manual_seed(0)
        width, batch = HQ * D, len(prompts)
        self.embedding, self.output = torch.randn(2, V, width) / 4
        self.place = torch.randn(PAGES_EACH * PAGE_SIZE, width) / 40
        self.qkv = [torch.randn(width, width + 2 * HKV * D) * width**-0.5 for _ in range(LAYERS)]
        pages = torch.randperm(batch * PAGES_EACH, dtype=torch.int32)  # a request's pages may lie anywhere
        self.page_table = pages.view(batch, PAGES_EACH).contiguous()
        shape = (len(pages), PAGE_SIZE, HKV, D)
        self.k_cache, self.v_cache = ([torch.zeros(shape) for _ in range(LAYERS)] for _ in range(2))
        self.texts, self.prompt_lens = [list(p) for p in prompts], [len(p) for p in prompts]
        self.temperature, self.seed = torch.tensor(temperature), torch.arange(batch)
        self.context_lens = torch.zeros(batch, dtype=torch.int32)
        lengths = [len(p) - 1 for p in prompts]  # prefill all but the root: no mask means a causal chain
        rows = [t for p in prompts for t in p[:-1]], [i for n in lengths for i in range(n)]
        cu_nodes = ints([sum(lengths[:b]) for b in range(batch + 1)])
        self.forward(ints(rows[0]), ints(rows[1]), cu_nodes, None, max(lengths))
        self.context_lens = ints(lengths)

    def forward(self, token_ids, positions, cu_nodes, tree_mask, max_nodes):
        """Logits [N, V] of packed rows; their KV goes into the cache at context_lens + row of the request."""
        slots = torch.empty(len(token_ids), dtype=torch.int32)
        ops.slot_mapping(self.page_table, self.context_lens, cu_nodes, PAGE_SIZE, slots)
        x = self.embedding[token_ids] + self.place[positions]
        for layer, weight in enumerate(self.qkv):
            q, k, v = (x @ weight).view(len(x), -1, D).split([HQ, HKV, HKV], 1)
            k_cache, v_cache, out = self.k_cache[layer], self.v_cache[layer], torch.empty(len(x), HQ, D)
            ops.write_kv(k, v, slots, None, None, "NHD", k_cache, v_cache)
            cache = (k_cache, v_cache, self.page_table, self.context_lens)
            # query_start, causal, positions, request_order, sinks, k_scale, v_scale, plan: none of them here
            options = (max_nodes, D**-0.5, 0.0, -1, "NHD", 0, False)  # scale, softcap, window, layout, splits, ...
            ops.tree_attention(q, *cache, cu_nodes, tree_mask, *[None] * 8, *options, None, out, None)
            x = x + out.flatten(1)
        return x @ self.output.T

    def step(self, draft) -> None:
        """One verified step of all requests."""
        trees = [draft(text) for text in self.texts]  # (tokens, parents), the root first
        batch, counts = len(trees), [len(tokens) for tokens, _ in trees]
        cu_nodes = ints([sum(counts[:b]) for b in range(batch + 1)])
        token_ids, parents = (ints([i for tree in trees for i in tree[part]]) for part in (0, 1))
        total, most = sum(counts), max(counts)
        # 1 the tree: mask words, depths, positions and links, all from the parents
        tree_mask = torch.empty(total, (most + 31) // 32, dtype=torch.int32)
        own, depths, positions, child, sibling = (torch.empty(total, dtype=torch.int32) for _ in range(5))
        tree_flags = torch.empty(batch, dtype=torch.int32)
        out = (own, tree_mask, depths, positions, child, sibling, tree_flags)
        ops.build_tree(parents, cu_nodes, self.context_lens, most, most - 1, *out)
        # 2 your forward pass over every node
        logits = self.forward(token_ids, positions, cu_nodes, tree_mask, most)
        # 3 accept a path and draw the token behind it, from raw logits; "coupled" gives plain decoding's own text
        emitted_ids, accepted = (torch.empty(batch, most, dtype=torch.int32) for _ in range(2))
        num_emitted, flags = (torch.empty(batch, dtype=torch.int32) for _ in range(2))
        position = torch.tensor([len(text) - n for text, n in zip(self.texts, self.prompt_lens)])
        sampling = (self.temperature, None, None, None, self.seed, position, None)  # top_k, top_p, min_p, step: off
        links = (token_ids, cu_nodes, own, child, sibling, tree_flags)
        rule = ("coupled", V, most, most - 1, "", 0.3, 0.09, "auto", None)
        ops.verify(logits, *links, *sampling, *[None] * 17, *rule, emitted_ids, num_emitted, accepted, flags, None)
        # 4 the accepted path's KV moves together, in all layers; then the context grows
        kept = (cu_nodes, accepted, num_emitted, None, "NHD")
        ops.commit_kv(self.page_table, self.context_lens, *kept, self.k_cache, self.v_cache)
        ops.advance(num_emitted, self.context_lens)
        for text, row, count in zip(self.texts, emitted_ids.tolist(), num_emitted.tolist()):
            text += row[:count]


def lookup(text: list[int], depth: int = 4) -> tuple[list[int], list[int]]:
    """A tree of what followed the last token before: the latest places in the text, a branch each, sharing the root."""
    tokens, parents, first = [text[-1]], [-1], []
    for at in range(len(text) - 2, -1, -1):
        if text[at] == text[-1] and text[at + 1] not in first and len(first) < 2:
            branch = text[at + 1 : at + 1 + depth]
            parents += [0, *range(len(tokens), len(tokens) + len(branch) - 1)]
            tokens, first = tokens + branch, [*first, text[at + 1]]
    return tokens, parents


def generate(draft, prompts: list[list[int]], temperature: list[float], num_tokens: int) -> tuple[list[list[int]], int]:
    engine, steps = YourEngine(prompts, temperature), 0
    while min(len(text) - n for text, n in zip(engine.texts, engine.prompt_lens)) < num_tokens:
        engine.step(draft)
        steps += 1
    return [text[n : n + num_tokens] for text, n in zip(engine.texts, engine.prompt_lens)], steps


if __name__ == "__main__":
    request = ([[1, 2, 3, 4, 1, 2], [5, 6, 7, 5]], [0.0, 0.7], 64)  # prompts, temperatures, tokens
    plain, plain_steps = generate(lambda text: (text[-1:], [-1]), *request)
    drafted, steps = generate(lookup, *request)
    assert drafted == plain, "speculation changed the text"
    print(f"the same {len(plain)} texts of {len(plain[0])} tokens: {plain_steps} steps without drafts, {steps} with")
