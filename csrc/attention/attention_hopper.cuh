// Tree attention with wgmma for 65 and more packed rows and 16-bit caches (variant XL90), on sm_90a alone.
//
//   warpgroup 0   producers: page ids, row offsets, visibility words; K and V into a ring of stages, whole tiles of
//                 context by the copy engine where pages allow it (KvMaps), others by 16-byte cp.async
//   warpgroup 1   consumers of rows 0..63     S = Q K^T (Q in registers), softmax, O += P V (P in registers)
//   warpgroup 2   consumers of rows 64..127   the same; while one multiplies, the other has its softmax
//
//   full[stage]    256 arrivals: every producer's copies have landed, every producer's look-ups are written; thread
//                  0's second one announces the copy engine's bytes, if it brings the tile
//   empty[stage]   8 arrivals: each consumer warp has left the stage
//
// Both sides follow the plan on their own, so that producers are ahead by the whole ring, across items. Stages hold 64
// keys, K then V, in panels of 64 rows of 128 bytes in the 128-byte swizzle, as wgmma reads them:
//
//   K   keys down, dims across: K-major          V   keys down, dims across: MN-major (transposed operand)
//
// Grid: at most one block a multiprocessor. Numerics as attention_mma.cuh. A non-finite V of a masked tile: producers
// put zeros in its place and say so, consumers add it from the cache to the rows that see it (attention_guard.cuh says
// why). Not handled: float8 caches, head dims other than 64 and 128 (attention_mma.cuh does those).
#pragma once
#include "attention/attention_guard.cuh"
#include "attention/attention_merge.cuh"
#include "attention/attention_tail.cuh"
#include "common/hopper.cuh"
#include "common/planted.h"

namespace specdec {

constexpr int kHopperThreads = 384, kHopperStages = 6, kPanel = kTileKeys * 128;
constexpr int kProducerRegisters = 72, kConsumerRegisters = 216;  // as many as the block is launched with, or it hangs
static_assert(128 * kProducerRegisters + 256 * kConsumerRegisters <= 65536 / kHopperThreads / 8 * 8 * kHopperThreads);

struct Producers {  // threads 0..127
  static constexpr int kThreads = 128;
  __device__ __forceinline__ static uint32_t thread() { return threadIdx.x; }
  __device__ __forceinline__ static void sync() { ptx::named_barrier_sync(1, kThreads); }
};
struct Consumers {
  static constexpr int kThreads = 256;
  __device__ __forceinline__ static uint32_t thread() { return threadIdx.x - Producers::kThreads; }
  __device__ __forceinline__ static void sync() { ptx::named_barrier_sync(2, kThreads); }
};

template <class Tile>
struct HopperInfo : TileInfo<Tile> {
  uint32_t broken[kMmaWarps];  // masked tiles: a producer warp has cleared non-finite values
};

// K and V as the copy engine sees them: a coordinate counts tiles of 64 keys by the bytes they begin at, in units of
// 2^shift (docs/attention.md). used: it brings this call's tiles that every row sees in full.
struct KvMaps {
  CUtensorMap k, v;
  int32_t k_shift, v_shift;
  bool used;
};

template <class T_, int D_>
struct HopperTile {
  using T = T_;
  using KV = T_;
  using Team = Consumers;
  using Info = HopperInfo<HopperTile>;
  static constexpr int D = D_, DV = D_, kRows = 128;
  static constexpr bool kFloat8 = false, kSplitKeys = false, kQInRegisters = true;
  static constexpr int kRowTiles = 1, kStepKeys = kTileKeys, kFragments = kTileKeys / 8, kSize = 2;
  static constexpr int kMaskUnit = 32, kMaskUnits = 2, kStepUnits = 2, kMaskWords = 8 * 32 * kMaskUnits;
  using MaskWord = uint32_t;
  static constexpr int kValues = D / 64 * kPanel, kStage = 2 * kValues;
  static constexpr int kSlot = kRows * (DV + 2);
  SPECDEC_HD static constexpr int key_byte(int row, int chunk) {
    return chunk / 8 * kPanel + row * 128 + ((chunk % 8 ^ (row & 7)) << 4);
  }
  SPECDEC_HD static constexpr int value_byte(int row, int chunk) { return kValues + key_byte(row, chunk); }
  SPECDEC_HD static constexpr int bytes(int stages) {  // the ring starts at a multiple of 1024
    return 1024 + stages * (kStage + static_cast<int>(sizeof(Info)));
  }
};

// The ring as one side sees it: the stage it is at, and the parity of the phase.
struct Pipe {
  uint64_t *full, *empty;
  int stages, stage = 0;
  uint32_t parity = 0;
  __device__ __forceinline__ void next() {
    if (++stage == stages) stage = 0, parity ^= 1;
  }
};

// The tile that this thread has copied into `stage`, masked: its non-finite values become zeros. True if there were
// any.
template <class Tile>
__device__ __forceinline__ bool clear_own_broken_values(unsigned char* stage) {
  constexpr int kChunks = Tile::DV / 8;
  constexpr uint32_t kExponent = std::is_same_v<typename Tile::T, BFloat16> ? 0x7f80u : 0x7c00u;
  bool broken = false;
#pragma unroll 1
  for (int c = threadIdx.x; c < kTileKeys * kChunks; c += Producers::kThreads) {
    uint32_t* words = reinterpret_cast<uint32_t*>(stage + Tile::value_byte(c / kChunks, c % kChunks));
#pragma unroll
    for (int i = 0; i < 4; i++) {
      const uint32_t low = (words[i] & kExponent) == kExponent ? 0xffffu : 0u;
      const uint32_t high = (words[i] >> 16 & kExponent) == kExponent ? 0xffff0000u : 0u;
      if (low | high) {
        words[i] &= ~(low | high);
        broken = true;
      }
    }
  }
  return broken;
}

// A tile that lies in one page, by the copy engine, D / 64 boxes of K and as many of V. One thread; it arrives at
// `full`.
template <class Tile>
__device__ __forceinline__ void copy_whole_tile(const AttentionParams& p, const Item& item,
                                                const typename Tile::Info& info, const KvMaps& maps,
                                                unsigned char* stage, uint64_t* full) {
  const int wrong = planted(Bug::short_announcement) ? -kPanel : planted(Bug::long_announcement) ? 16 : 0;
  ptx::mbarrier_arrive_expect(full, Tile::kStage + wrong);
  int64_t k_byte = info.k_row[0] + item.head * p.k_stride_head * Tile::kSize;
  if (planted(Bug::wrong_coordinate)) k_byte -= k_byte % (p.k_stride_page * Tile::kSize);
  const int64_t v_byte = info.v_row[0] + item.head * p.v_stride_head * Tile::kSize;
  const auto k_tile = static_cast<int32_t>(k_byte >> maps.k_shift);
  const auto v_tile = static_cast<int32_t>(v_byte >> maps.v_shift);
#pragma unroll
  for (int panel = 0; panel < Tile::D / 64; panel++) {
    ptx::tensor_copy(stage + panel * kPanel, &maps.k, {64 * panel, 0, 0, 0, k_tile}, full);
    ptx::tensor_copy(stage + Tile::kValues + panel * kPanel, &maps.v, {64 * panel, 0, 0, 0, v_tile}, full);
  }
}

template <class Tile>
__device__ __forceinline__ void produce(const AttentionParams& p, const KvMaps& maps, const Item& item,
                                        unsigned char* ring, typename Tile::Info* infos, Pipe& pipe) {
  TileLoader<Tile> loader(p, item, ring, infos);
  loader.ask(item.begin);
  for (int32_t tile = item.begin; tile < item.end; tile++) {
    typename Tile::Info& info = infos[pipe.stage];
    uint64_t* const full = &pipe.full[pipe.stage];
    unsigned char* const stage = ring + pipe.stage * Tile::kStage;
    if (!planted(Bug::refill_too_early)) ptx::mbarrier_wait(&pipe.empty[pipe.stage], pipe.parity ^ 1);
    __syncwarp();
    loader.look_up(tile, pipe.stage);
    loader.ask(tile + 1);
    Producers::sync();
    const uint64_t shown = shown_keys(info);
    const bool masked = loader.masked(tile);
    if (shown != ~uint64_t{0}) hide_missing<Tile, Producers>(info, shown, !masked);
    const bool whole = maps.used && !masked && shown == ~uint64_t{0};
    if (!whole) loader.load(tile, pipe.stage, pipe.stage);
    if (masked) {
      ptx::cp_async_wait<0>();
      const bool broken = clear_own_broken_values<Tile>(stage);
      const bool any = __any_sync(kFullWarp, broken);
      if (threadIdx.x % 32 == 0) info.broken[threadIdx.x / 32] = any;
    }
    ptx::mbarrier_arrive_after_copies(full);
    if (whole && threadIdx.x == 0)
      copy_whole_tile<Tile>(p, item, info, maps, stage, full);
    else
      ptx::mbarrier_arrive(full);
    pipe.next();
  }
}

// Non-finite values of a masked tile, as the cache has them, to the rows that see them.
template <class Tile>
__device__ __forceinline__ void add_cleared_values(WarpState<Tile>& state, const typename Tile::KV* head,
                                                   const typename Tile::Info& info, int warp, int lane) {
#pragma unroll 1
  for (int position = 0; position < kTileKeys; position++) {
    bool seen[2];
#pragma unroll
    for (int half = 0; half < 2; half++) seen[half] = sees_position<Tile>(info, position, 0, half, warp, lane);
    if (!(seen[0] | seen[1])) continue;
    const auto* row =
        reinterpret_cast<const typename Tile::KV*>(reinterpret_cast<const char*>(head) + info.v_row[position]);
#pragma unroll
    for (int n = 0; n < Tile::DV / 8; n++)
#pragma unroll
      for (int i = 0; i < 2; i++) {
        const float x = to_float(row[column_of<Tile>(n, i, lane)]);
        if ((float_bits(x) & 0x7f800000u) != 0x7f800000u) continue;
#pragma unroll
        for (int half = 0; half < 2; half++)
          if (seen[half]) state.o[0][n][2 * half + i] += x;
      }
  }
}

// S = Q K^T of the stage, issued and committed.
template <class Tile>
__device__ __forceinline__ void issue_scores(float (&s)[1][Tile::kFragments][4], const WarpState<Tile>& state,
                                             const unsigned char* stage) {
  auto& flat = reinterpret_cast<float (&)[kTileKeys / 2]>(s);
#pragma unroll
  for (int k = 0; k < Tile::D / 16; k++) {
    const uint64_t keys =
        ptx::matrix_descriptor(stage + k / 4 * kPanel + k % 4 * 32, kPanel, 1024, ptx::Swizzle::bytes128);
    ptx::wgmma<kTileKeys, false>(flat, state.q[k], keys, k > 0, typename Tile::T{});
  }
  ptx::wgmma_commit();
}

// O += P V of the stage, issued and committed.
template <class Tile>
__device__ __forceinline__ void issue_outputs(WarpState<Tile>& state, const uint32_t (&weights)[kTileKeys / 16][4],
                                              const unsigned char* stage) {
  auto& flat = reinterpret_cast<float (&)[Tile::DV / 2]>(state.o);
#pragma unroll
  for (int k = 0; k < kTileKeys / 16; k++) {
    const uint64_t values =
        ptx::matrix_descriptor(stage + Tile::kValues + k * 16 * 128, kPanel, 1024, ptx::Swizzle::bytes128);
    ptx::wgmma<Tile::DV, true>(flat, weights[k], values, true, typename Tile::T{});
  }
  ptx::wgmma_commit();
}

// Q of this thread's two rows as A fragments, straight from memory; rows behind the request's are zero.
template <class Tile>
__device__ __forceinline__ void load_query_fragments(WarpState<Tile>& state, const AttentionParams& p, const Item& item,
                                                     int warp, int lane) {
#pragma unroll
  for (int half = 0; half < 2; half++) {
    const int32_t at = item.row0 + row_of<Tile>(warp, 0, half, lane);
    const bool valid = at < item.rows;
    const int32_t node = valid ? at / p.group : 0, q_head = item.head * p.group + (valid ? at % p.group : 0);
    const auto* row = reinterpret_cast<const typename Tile::T*>(p.q) + (item.request.first_row + node) * p.q_stride_n +
                      q_head * p.q_stride_h;
#pragma unroll
    for (int k = 0; k < Tile::D / 16; k++)
#pragma unroll
      for (int part = 0; part < 2; part++)
        state.q[k][2 * part + half] =
            valid ? *reinterpret_cast<const uint32_t*>(row + 16 * k + 8 * part + 2 * (lane % 4)) : 0u;
  }
}

template <class Tile>
__device__ __forceinline__ void consume(const AttentionParams& p, const Item& item, WarpState<Tile>& state,
                                        const unsigned char* ring, const typename Tile::Info* infos, Pipe& pipe) {
  const int lane = threadIdx.x % 32, warp = Consumers::thread() / 32;
  const float k_scale = p.k_scale ? p.k_scale[item.head * p.k_scale_stride] : 1.0f;
  const ScoreScale scale = {p.softmax_scale * k_scale * (p.softcap > 0.0f ? 1.0f / p.softcap : kLog2E),
                            p.softcap * kLog2E};
#pragma unroll
  for (int half = 0; half < 2; half++) {
    state.top[0][half] = -INFINITY;
    state.sum[0][half] = 0.0f;
  }
#pragma unroll
  for (int n = 0; n < Tile::DV / 8; n++)
#pragma unroll
    for (int i = 0; i < 4; i++) state.o[0][n][i] = 0.0f;
  const bool busy = item.row0 + warp / 4 * 64 < item.rows;  // the same in all of a warpgroup
  if (!busy) {
    for (int32_t tile = item.begin; tile < item.end; tile++, pipe.next()) {
      ptx::mbarrier_wait(&pipe.full[pipe.stage], pipe.parity);
      __syncwarp();
      if (lane == 0) ptx::mbarrier_arrive(&pipe.empty[pipe.stage]);
    }
    return;
  }
  load_query_fragments<Tile>(state, p, item, warp, lane);
  const auto* v_head = reinterpret_cast<const typename Tile::KV*>(p.v_cache) + item.head * p.v_stride_head;

  if (item.begin >= item.end) return;
  auto wait_for_tile = [&] {
    const uint32_t parity = planted(Bug::wrong_parity) ? pipe.parity ^ 1 : pipe.parity;
    if (!planted(Bug::missing_mbarrier_wait)) ptx::mbarrier_wait(&pipe.full[pipe.stage], parity);
    if (!planted(Bug::no_proxy_fence)) ptx::fence_async_proxy();
  };
  float s[1][Tile::kFragments][4];
  wait_for_tile();
  ptx::wgmma_fence();
  issue_scores<Tile>(s, state, ring + pipe.stage * Tile::kStage);
  ptx::wgmma_wait<0>();
  for (int32_t tile = item.begin;; tile++) {
    const int stage = pipe.stage;
    const typename Tile::Info& info = infos[stage];
    const bool rows_differ = tile >= item.masked_from || tile < item.masked_until;
    if (!rows_differ && shown_keys(info) == ~uint64_t{0}) {
      softmax<Tile, false>(s, state, scale, nullptr);
    } else {
      softmax<Tile, true>(s, state, scale, own_words<Tile>(info, 0, warp, lane));
      if (rows_differ && (info.broken[0] | info.broken[1] | info.broken[2] | info.broken[3]))
        add_cleared_values<Tile>(state, v_head, info, warp, lane);
    }
    uint32_t weights[kTileKeys / 16][4];
#pragma unroll
    for (int k = 0; k < kTileKeys / 16; k++)
#pragma unroll
      for (int i = 0; i < 4; i++)
        weights[k][i] =
            ptx::pack_pair(s[0][2 * k + i / 2][i % 2 * 2], s[0][2 * k + i / 2][i % 2 * 2 + 1], typename Tile::T{});
    pipe.next();
    const bool last = tile + 1 == item.end;
    if (!last) wait_for_tile();
    ptx::wgmma_fence();
    // Scores of the next tile run beside these outputs. Behind the last tile there is none: they are taken again from
    // this one, which costs a product an item and keeps wgmma out of branches, where ptxas would serialise it.
    issue_scores<Tile>(s, state, ring + (last ? stage : pipe.stage) * Tile::kStage);
    issue_outputs<Tile>(state, weights, ring + stage * Tile::kStage);
    if (planted(Bug::release_before_wait) && lane == 0) ptx::mbarrier_arrive(&pipe.empty[stage]);
    ptx::wgmma_wait<0>();
    __syncwarp();
    if (!planted(Bug::release_before_wait) && lane == 0) ptx::mbarrier_arrive(&pipe.empty[stage]);
    if (last) return;
  }
}

template <class T, int D>
__global__ void __launch_bounds__(kHopperThreads, 1)
    tree_attention_hopper_kernel(const AttentionParams p, const __grid_constant__ KvMaps maps) {
  using Tile = HopperTile<T, D>;
  SPECDEC_DYNAMIC_SHARED(unsigned char, shared);
  SPECDEC_SHARED(uint64_t, barriers, 2 * kHopperStages);
  SPECDEC_SHARED(WalkState, walks, 2);
  SPECDEC_SHARED(MergeState<Tile>, scratch, 1);
#if defined(__CUDA_ARCH__)
  unsigned char* ring = shared + (1024 - ptx::shared_address(shared) % 1024) % 1024;
#else
  unsigned char* ring = shared;  // the models count from here
#endif
  auto* infos = reinterpret_cast<typename Tile::Info*>(ring + p.stages * Tile::kStage);
  Pipe pipe = {barriers, barriers + kHopperStages, p.stages};
  if (threadIdx.x == 0) {
    for (int stage = 0; stage < p.stages; stage++) {
      ptx::mbarrier_init(&pipe.full[stage], 2 * Producers::kThreads);
      ptx::mbarrier_init(&pipe.empty[stage], Consumers::kThreads / 32);
    }
    ptx::fence_mbarrier_init();
    if (maps.used) {
      ptx::prefetch_tensor_map(&maps.k);
      ptx::prefetch_tensor_map(&maps.v);
    }
  }
  __syncthreads();
  if (threadIdx.x < Producers::kThreads) {
    ptx::give_registers<kProducerRegisters>();
    for_each_item<Producers, Tile::kRows>(p, walks[0],
                                          [&] { produce<Tile>(p, maps, walks[0].item, ring, infos, pipe); });
    ptx::named_barrier_sync(3, kHopperThreads);  // the plan is read to its end
    return;
  }
  ptx::take_registers<kConsumerRegisters>();
  if (threadIdx.x / 32 == kHopperThreads / 32 - 1) clear_tail<T>(p, blockIdx.x, gridDim.x);
  for_each_item<Consumers, Tile::kRows>(p, walks[1], [&] {
    WarpState<Tile> state;
    consume<Tile>(p, walks[1].item, state, ring, infos, pipe);
    finish_item<Tile>(p, state, nullptr, walks[1], scratch[0]);
  });
  ptx::named_barrier_sync(3, kHopperThreads);
  clear_own_plan<Consumers>(p, scratch[0].ticket);
}

}  // namespace specdec
