// tree_attention on the CPU: schedule, threads. The arithmetic is in attention_cpu_<instruction set>.cpp.
#include <torch/csrc/stable/library.h>
#include <torch/csrc/stable/ops.h>

#include "common/cpu.h"
#include "item_cpu.h"

namespace specdec {
namespace {

Element element_of(ScalarType dtype) {
  switch (dtype) {
    case ScalarType::BFloat16: return Element::bfloat16;
    case ScalarType::Half: return Element::float16;
    case ScalarType::Float8_e4m3fn: return Element::float8_e4m3;
    case ScalarType::Float8_e5m2: return Element::float8_e5m2;
    default: return Element::float32;
  }
}

// float8 values are bfloat16 values and a bfloat16 cache meets bfloat16 queries, so the pair kernels lose nothing.
const TileKernels& choose_kernels(Element q) {
#if defined(__x86_64__)
  Isa level = isa();
  if (q == Element::bfloat16 && level >= Isa::amx) return amx_kernels();
  if (q == Element::bfloat16 && level >= Isa::avx512_bf16) return avx512_bf16_kernels();
  if (level >= Isa::avx512) return avx512_kernels();
  if (level >= Isa::avx2) return avx2_kernels();
#endif
  return scalar_kernels();
}

void run(const TreeAttentionParams& p) {
  static thread_local Arena plan_arena, partial_arena;
  const int threads = static_cast<int>(torch::stable::get_num_threads());
  const int heads_limit = choose_heads_limit(p, threads);
  const int64_t num_blocks = count_blocks(p, heads_limit);
  plan_arena.reserve(Arena::bytes_for<Block>(num_blocks));
  Block* blocks = plan_arena.take<Block>(num_blocks);
  Schedule schedule = make_schedule(p, threads, heads_limit, blocks);
  partial_arena.reserve(Arena::bytes_for<float>(schedule.partial_floats) +
                        Arena::bytes_for<int32_t>(schedule.num_items) +
                        Arena::bytes_for<std::atomic<int32_t>>(num_blocks));
  float* partials = partial_arena.take<float>(schedule.partial_floats);
  int32_t* item_block = partial_arena.take<int32_t>(schedule.num_items);
  auto* open_chunks = partial_arena.take<std::atomic<int32_t>>(num_blocks);
  for (int64_t i = 0; i < num_blocks; i++) {
    new (open_chunks + i) std::atomic<int32_t>(blocks[i].num_chunks);
    for (int c = 0; c < blocks[i].num_chunks; c++) item_block[blocks[i].first_item + c] = static_cast<int32_t>(i);
  }
  std::atomic<int64_t> next_item{0};
  auto drain = [&](int64_t, int64_t) {
    ItemWorker worker(p, schedule.rows);
    for (int64_t i; (i = next_item.fetch_add(1, std::memory_order_relaxed)) < schedule.num_items;) {
      const Block& block = blocks[item_block[i]];
      worker.run(block, static_cast<int>(i - block.first_item), partials);
      if (block.num_chunks > 1 && open_chunks[item_block[i]].fetch_sub(1, std::memory_order_acq_rel) == 1)
        worker.merge(block, partials);
    }
  };
  int64_t workers = schedule.num_items < threads ? schedule.num_items : threads;
  if (workers == 1) drain(0, 1);
  if (workers > 1) torch::stable::parallel_for(0, workers, 1, drain);
}

// Rows behind the last request hold no query: 0 and -inf, so that no garbage reaches what follows.
void clear_tail(const TreeAttentionParams& p) {
  int64_t row = 0;
  for (int32_t b = 0; b < p.num_requests; b++) {
    const AttentionRequest r = attention_request(p, b);
    if (r.first_row + r.num_nodes > row) row = r.first_row + r.num_nodes;
  }
  for (; row < p.num_rows; row++)
    for (int64_t h = 0; h < p.num_q_heads; h++) {
      int bytes = element_bytes(p.q_element);
      std::memset(p.out + (row * p.out_stride_n + h * p.out_stride_h) * bytes, 0, p.v_dim * bytes);
      if (p.lse) p.lse[row * p.lse_stride_n + h] = -INFINITY;
    }
}

void tree_attention_cpu(Tensor q, Tensor k_cache, Tensor v_cache, Tensor page_table, Tensor context_lens,
                        Tensor cu_nodes, std::optional<Tensor> tree_mask, std::optional<Tensor> query_start,
                        std::optional<Tensor> causal, std::optional<Tensor> positions,
                        std::optional<Tensor> request_order, std::optional<Tensor> sinks, std::optional<Tensor> k_scale,
                        std::optional<Tensor> v_scale, std::optional<Tensor> plan, int64_t max_nodes,
                        double softmax_scale, double softcap, int64_t window, std::string kv_layout, int64_t num_splits,
                        bool batch_invariant, std::optional<Tensor> workspace, Tensor out, std::optional<Tensor> lse) {
  TreeAttentionParams p = {};
  check_tree_attention(p, q, k_cache, v_cache, page_table, context_lens, cu_nodes, tree_mask, query_start, causal,
                       positions, request_order, sinks, k_scale, v_scale, plan, max_nodes, softmax_scale, softcap,
                       window, kv_layout, num_splits, batch_invariant, out, lse);
  p.q_element = element_of(q.scalar_type());
  p.kv_element = element_of(k_cache.scalar_type());
  p.kernels = &choose_kernels(p.q_element);
  p.num_splits = static_cast<int>(num_splits);  // a plan is for GPU blocks; threads here draw items from a counter
  if (p.num_rows == 0 || p.num_q_heads == 0) return;
  run(p);
  clear_tail(p);
}

}  // namespace
}  // namespace specdec

STABLE_TORCH_LIBRARY_IMPL(specdec, CPU, m) {
  m.impl("tree_attention", TORCH_BOX(&specdec::tree_attention_cpu));
}
