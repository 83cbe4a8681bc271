// wgmma.mma_async m64nNk16: 128 threads, accumulators in registers, operand B (and A) in shared memory, asynchronous.
//
// Accumulators (64 x N): warp w, lane (g, t) = (lane / 4, lane % 4) holds in d[4 j + e] row 16 w + g + 8 (e / 2) and
// column 8 j + 2 t + e % 2. A in registers: as mma.m16n8k16, one 16-row slice a warp.
//
// Matrix descriptor: bits 0-13 start, 16-29 leading and 32-45 stride offset (bytes / 16), 62-63 swizzle (1: 128, 2: 64,
// 3: 32 bytes, 0: none). Element (mn, k), with rows of w elements (64, 32, 16; 8 without swizzle):
//
//            K-major (not transposed)                             MN-major (transposed)
//   swizzle  mn/8 stride + mn%8 (2 w) + 2 k                       mn/w leading + k/8 stride + k%8 (2 w) + 2 (mn%w)
//   none     mn/8 stride + k/8 leading + mn%8 16 + 2 (k%8)        mn/8 stride + k/8 leading + k%8 16 + 2 (mn%8)
//
// and then bits 4-6 of the address are xor-ed with bits 7-9 (as many as the swizzle has).
#include <algorithm>

#include "hopper.h"
#include "internal.h"
#include "number_formats.h"

namespace emulated {

struct WgmmaOp {
  Wgmma call;
  const char* arena;
  float* d[128];
  uint32_t a[128][4];
  std::vector<float> start;           // accumulators as they were, [128][n / 2]; unused behind `before`
  std::shared_ptr<WgmmaOp> before;    // the op in flight that has the same accumulators
  std::vector<float> result;          // empty: not computed yet
  std::vector<uint32_t> a_chunks[4];  // 16-byte chunks of shared memory that each warp's rows of A lie in
  std::vector<uint32_t> b_chunks;
  const void* where;
  int warps_left = 4;
};

static uint64_t element(uint64_t matrix, int mn, int k, bool mn_major) {
  const uint64_t start = (matrix & 0x3fff) << 4, leading = (matrix >> 16 & 0x3fff) << 4;
  const uint64_t stride = (matrix >> 32 & 0x3fff) << 4;
  const int swizzle = static_cast<int>(matrix >> 62);
  const uint64_t w = swizzle == 1 ? 64 : swizzle == 2 ? 32 : swizzle == 3 ? 16 : 8;
  const auto m = static_cast<uint64_t>(mn), c = static_cast<uint64_t>(k);
  uint64_t at = start;
  if (!mn_major)
    at += swizzle ? m / 8 * stride + m % 8 * w * 2 + c * 2 : m / 8 * stride + c / 8 * leading + m % 8 * 16 + c % 8 * 2;
  else
    at += swizzle ? m / w * leading + c / 8 * stride + c % 8 * w * 2 + m % w * 2
                  : m / 8 * stride + c / 8 * leading + c % 8 * 16 + m % 8 * 2;
  if (swizzle) at ^= (at >> 7 & (swizzle == 1 ? 7 : swizzle == 2 ? 3 : 1)) << 4;
  return at;
}

static void add_chunks(std::vector<uint32_t>& chunks, uint64_t matrix, int first, int count, bool mn_major, At at) {
  Block* block = self()->owner;
  std::vector<bool> seen(kArena / 16);
  for (int mn = first; mn < first + count; mn++)
    for (int k = 0; k < 16; k++) {
      uint64_t byte = element(matrix, mn, k, mn_major);
      if (byte + 2 > block->used) trap("wgmma operand outside shared memory", at);
      if (seen[byte / 16]) continue;
      seen[byte / 16] = true;
      chunks.push_back(static_cast<uint32_t>(byte / 16));
    }
}

static void compute(WgmmaOp& op) {
  if (!op.result.empty()) return;
  const Wgmma& call = op.call;
  const int n = call.n, half = n / 2;
  if (op.before) compute(*op.before);
  const std::vector<float>& start = op.before ? op.before->result : op.start;
  auto value = [&](uint16_t bits) { return call.element == Element::bf16 ? bf16_value(bits) : f16_value(bits); };
  auto shared = [&](uint64_t byte) {
    uint16_t bits;
    memcpy(&bits, op.arena + byte, 2);
    return value(bits);
  };
  std::vector<float> a(64 * 16), b(16 * static_cast<size_t>(n)), d(64 * static_cast<size_t>(n));
  auto spot = [&](int thread, int i) {  // of accumulator i in d
    int row = thread / 32 * 16 + thread % 32 / 4 + 8 * (i % 4 / 2), column = 8 * (i / 4) + 2 * (thread % 4) + i % 2;
    return static_cast<size_t>(row * n + column);
  };
  for (int thread = 0; thread < 128; thread++) {
    for (int i = 0; i < half; i++)
      d[spot(thread, i)] = call.accumulate ? start[static_cast<size_t>(thread * half + i)] : 0.0f;
    int row = thread / 32 * 16 + thread % 32 / 4, k = 2 * (thread % 4);
    for (int r = 0; call.a && r < 4; r++)
      for (int part = 0; part < 2; part++)
        a[static_cast<size_t>((row + 8 * (r % 2)) * 16 + k + 8 * (r / 2) + part)] =
            value(static_cast<uint16_t>(op.a[thread][r] >> (16 * part)));
  }
  for (int i = 0; !call.a && i < 64; i++)
    for (int k = 0; k < 16; k++)
      a[static_cast<size_t>(i * 16 + k)] = shared(element(call.a_matrix, i, k, call.transpose_a));
  for (int j = 0; j < n; j++)
    for (int k = 0; k < 16; k++)
      b[static_cast<size_t>(k * n + j)] = shared(element(call.b_matrix, j, k, call.transpose_b));
  const auto sign = static_cast<float>(call.a_sign * call.b_sign);
  for (int i = 0; i < 64; i++)
    for (int k = 0; k < 16; k++)
      for (int j = 0; j < n; j++)
        d[static_cast<size_t>(i * n + j)] +=
            sign * a[static_cast<size_t>(i * 16 + k)] * b[static_cast<size_t>(k * n + j)];
  op.result.resize(128 * static_cast<size_t>(half));
  for (int thread = 0; thread < 128; thread++)
    for (int i = 0; i < half; i++) op.result[static_cast<size_t>(thread * half + i)] = d[spot(thread, i)];
  op.before = nullptr;
  op.start.clear();
}

static void deliver(const WgmmaOp& op, int first, int count) {
  const size_t half = static_cast<size_t>(op.call.n / 2);
  for (int thread = first; thread < first + count; thread++)
    memcpy(op.d[thread], &op.result[static_cast<size_t>(thread) * half], half * sizeof(float));
}

struct Issue {
  const Wgmma* call;
  const void* where;
};

static void issue(void** arguments) {
  Thread* thread = self();
  Block* block = thread->owner;
  const uint32_t group = thread->linear / 128;
  auto op = std::make_shared<WgmmaOp>();
  op->call = *static_cast<Issue*>(arguments[0])->call;
  op->where = static_cast<Issue*>(arguments[0])->where;
  op->arena = block->arena;
  const Wgmma& call = op->call;
  const size_t half = static_cast<size_t>(call.n / 2);
  for (int i = 0; i < 128; i++) {
    const Wgmma& mine = *static_cast<Issue*>(arguments[i])->call;
    if (mine.a_matrix != call.a_matrix || mine.b_matrix != call.b_matrix || mine.accumulate != call.accumulate)
      trap("wgmma descriptors differ between the threads of a warpgroup", thread->at);
    op->d[i] = mine.d;
    if (mine.a) memcpy(op->a[i], mine.a, sizeof op->a[i]);
  }
  auto& in_flight = block->wgmma_ops[group];
  for (auto& other : in_flight)
    if (call.late && other->d[0] == op->d[0] && other->call.n == call.n) op->before = other;
  if (!op->before)
    for (int i = 0; i < 128; i++) op->start.insert(op->start.end(), op->d[i], op->d[i] + half);
  add_chunks(op->b_chunks, call.b_matrix, 0, call.n, call.transpose_b, thread->at);
  for (int w = 0; w < 4; w++) {
    Warp& warp = block->warps[group * 4 + static_cast<uint32_t>(w)];
    if (!call.a) add_chunks(op->a_chunks[w], call.a_matrix, 16 * w, 16, call.transpose_a, thread->at);
    if (!warp.lane[0]->wgmma_fenced)
      report_once("unfenced", op->where, nullptr,
                  "wgmma without wgmma.fence since the last wait, at " + place(op->where));
    warp.issued.push_back(op);
    if (!grid.checks) continue;
    for (const auto* chunks : {&op->a_chunks[w], &op->b_chunks})
      for (uint32_t chunk : *chunks) operand_read_begins(warp.lane[0], chunk * 16, op->where);
  }
  if (block->wgmma_reads.empty()) block->wgmma_reads.resize(kArena / 16);
  for (const auto* chunks : {&op->a_chunks[0], &op->a_chunks[1], &op->a_chunks[2], &op->a_chunks[3], &op->b_chunks})
    for (uint32_t chunk : *chunks) block->wgmma_reads[chunk]++;
  in_flight.push_back(op);
  if (!call.late || config.landing == Landing::early || (config.landing == Landing::random && (grid.random() & 1))) {
    compute(*op);
    deliver(*op, 0, 128);
  } else {
    for (int i = 0; i < 128; i++) memset(op->d[i], 0xff, half * sizeof(float));  // NaN until it is waited for
  }
}

__attribute__((noinline)) void wgmma(const Wgmma& call, At at, const void* where) {
  static const char kinds[2] = {};
  if (call.n % 8 || call.n < 8 || call.n > 256) trap("wgmma: N must be a multiple of 8 up to 256", at);
  if (self()->owner->num_threads % 128) trap("wgmma: the block is not made of warpgroups", at);
  Issue argument{&call, where ? where : __builtin_return_address(0)};
  warpgroup_collective(&kinds[call.a != nullptr], &argument, issue, at);
}

void wgmma_fence() {
  self()->wgmma_fenced = true;
}

void wgmma_commit() {
  Thread* thread = self();
  if (thread->lane) return;  // once a warp: the instruction is warp-wide
  thread->warp->committed.push_back(std::move(thread->warp->issued));
  thread->warp->issued.clear();
}

static void retire(Thread* lead, const std::shared_ptr<WgmmaOp>& op) {
  Block* block = lead->owner;
  compute(*op);
  if (op->call.late) deliver(*op, static_cast<int>(lead->linear % 128), 32);
  const int w = static_cast<int>(lead->linear % 128 / 32);
  if (grid.checks)
    for (const auto* chunks : {&op->a_chunks[w], &op->b_chunks})
      for (uint32_t chunk : *chunks) operand_read_ends(lead, chunk * 16, op->where);
  if (--op->warps_left) return;
  for (const auto* chunks : {&op->a_chunks[0], &op->a_chunks[1], &op->a_chunks[2], &op->a_chunks[3], &op->b_chunks})
    for (uint32_t chunk : *chunks) block->wgmma_reads[chunk]--;
  std::erase(block->wgmma_ops[lead->linear / 128], op);
}

struct Wait {
  int groups;
};

static void finish_wait(void** arguments, uint32_t) {
  Warp* warp = self()->warp;
  Thread* lead = warp->lane[0];
  auto allowed = static_cast<size_t>(static_cast<Wait*>(arguments[0])->groups);
  while (warp->committed.size() > allowed) {
    for (const auto& op : warp->committed.front()) retire(lead, op);
    warp->committed.erase(warp->committed.begin());
  }
  if (grid.checks) {  // every lane knows of the reads that have ended
    Block* block = lead->owner;
    uint32_t& ticks = block->clock_of(lead->linear)[lead->linear];
    for (Thread* lane : warp->lane) {
      uint32_t& known = block->clock_of(lane->linear)[lead->linear];
      known = std::max(known, ticks);
    }
    ticks++;
  }
  for (Thread* lane : warp->lane) lane->wgmma_fenced = false;
}

void wgmma_wait(int groups_in_flight, At at) {
  static const char kind = 0;
  Wait argument{groups_in_flight};
  warp_collective(&kind, 0xffffffffu, &argument, finish_wait, at);
}

// A block has the registers it was launched with (what __launch_bounds__ leaves a thread, at most): a warp takes what
// others have given, or waits for it.
void set_max_registers(int count, At at) {
  if (count % 8 || count < 24 || count > 256) trap("setmaxnreg: expected a multiple of 8 from 24 to 256", at);
  Thread* thread = self();
  if (thread->lane) return;  // once a warp: the instruction is warp-wide
  Block* block = thread->owner;
  int& mine = thread->warp->registers;
  if (!mine) mine = std::min(256, 65536 / static_cast<int>(block->num_threads) / 8 * 8);
  while (count - mine > block->spare_registers) {
    thread->at = at;
    thread->state = State::at_barrier;
    block->want_registers.push_back(thread);
    wait_here(thread);
  }
  block->spare_registers += mine - count;
  mine = count;
  for (Thread* other : block->want_registers) make_runnable(other, false);
  block->want_registers.clear();
}

void check_wgmma_at_exit(Thread* thread) {
  Warp* warp = thread->warp;
  if (thread->lane == 0 && !(warp->issued.empty() && warp->committed.empty()))
    report("warp exits with wgmma products that were never waited for", thread->owner, thread);
}

}  // namespace emulated
