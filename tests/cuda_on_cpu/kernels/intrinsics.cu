// One word of output a check and a thread: everything device code may use, computed by the model (path A) and by the
// compiled PTX (path B). The two must agree bit for bit (tests/test_cuda_on_cpu_paths.py).
#include "common/launch.cuh"
#include "common/reduce.cuh"

namespace specdec {

constexpr int kThreads = 128, kRows = 128;

// Largest value and the lowest index that holds it.
struct ValueIndex {
  float value;
  int index;
};
__device__ __forceinline__ ValueIndex better(ValueIndex a, ValueIndex b) {
  bool take_b = b.value > a.value || (b.value == a.value && b.index < a.index);
  return take_b ? b : a;
}
__device__ __forceinline__ ValueIndex warp_argmax(ValueIndex mine) {
#pragma unroll
  for (int distance = 16; distance > 0; distance /= 2) {
    ValueIndex other{__shfl_xor_sync(kFullWarp, mine.value, distance),
                     __shfl_xor_sync(kFullWarp, mine.index, distance)};
    mine = better(mine, other);
  }
  return mine;
}

__global__ void __launch_bounds__(kThreads)
    intrinsics_kernel(const uint32_t* __restrict__ in, uint32_t* __restrict__ out, int* counter, int n) {
  SPECDEC_SHARED(uint32_t, words, kThreads);
  SPECDEC_SHARED(int, counts, 4);
  SPECDEC_DYNAMIC_SHARED(uint32_t, tile);  // 16 rows of 16 bf16 for ldmatrix, then 16-byte copies
  const int t = threadIdx.x, lane = t & 31, warp = t >> 5;
  const uint32_t x = in[t], y = in[(t + 37) % kThreads];
  const float f = static_cast<float>(static_cast<int>(x % 2001) - 1000) * 0.37f;
  const float g = static_cast<float>(static_cast<int>(y % 999) + 1) * 0.11f;
  int row = 0;
  auto put = [&](uint32_t value) { out[row++ * kThreads + t] = value; };
  auto put_float = [&](float value) { put(__float_as_uint(value)); };
  // bits
  put(__popc(x));
  put(__clz(static_cast<int>(x >> (y & 31))));
  put(__brev(x));
  put(__ffs(static_cast<int>(x & y)));
  put(__umulhi(x, y));
  put(__funnelshift_r(x, y, y & 31));
  put(__funnelshift_l(x, y, y & 31));
  put(__byte_perm(x, y, (x ^ y) & 0x7777));
  put(__popcll(static_cast<unsigned long long>(x) << 32 | y));
  // warp collectives
  put(__ballot_sync(kFullWarp, x & 1));
  put(__any_sync(kFullWarp, (x & 255) == 7));
  put(__all_sync(kFullWarp, (x & 255) != 7));
  put(__match_any_sync(kFullWarp, x & 3));
  put(__reduce_add_sync(kFullWarp, x));
  put(__reduce_max_sync(kFullWarp, x));
  put(__reduce_min_sync(kFullWarp, x));
  put(__reduce_or_sync(kFullWarp, x & 0x0f0f0f0f));
  put(__shfl_sync(kFullWarp, x, (lane * 5) & 31));
  put(__shfl_up_sync(kFullWarp, x, 3));
  put(__shfl_down_sync(kFullWarp, x, 5, 16));
  put(__shfl_xor_sync(kFullWarp, x, 9));
  put(__shfl_sync(kFullWarp, x, 1, 8));
  put(__float_as_uint(warp_sum(static_cast<float>(x & 255))));
  ValueIndex best = warp_argmax({static_cast<float>(x % 13), lane});
  put(best.index);
  // integers
  put(static_cast<uint32_t>(static_cast<int>(x) >> (y & 31)));
  put(x >> (y & 31));
  put(x << (y & 31));
  put(static_cast<uint32_t>(static_cast<int>(x) / (static_cast<int>(y) | 1)));
  put(x % (y | 1));
  put(static_cast<uint32_t>(static_cast<int64_t>(static_cast<int>(x)) / (static_cast<int64_t>(y) + 1)));
  put(static_cast<uint32_t>(min(static_cast<int>(x), static_cast<int>(y))));
  put(max(x, y));
  put(static_cast<uint32_t>(static_cast<uint64_t>(x) * y >> 13));
  put(static_cast<uint32_t>(static_cast<int64_t>(static_cast<int>(x)) * static_cast<int>(y) >> 29));
  put((x & 0xf0f0) | (~y & 0x0f0f));
  // floats
  put_float(f + g);
  put_float(f * g);
  put_float(fmaf(f, g, 1.5f));
  put_float(f / g);
  put_float(sqrtf(g));
  put_float(fmaxf(f, g));
  put_float(fminf(f, g));
  put_float(floorf(f));
  put_float(ceilf(f));
  put_float(rintf(f));
  put_float(truncf(f));
  put(static_cast<uint32_t>(static_cast<int>(f)));
  put(static_cast<uint32_t>(g));
  put_float(fabsf(f));
  put_float(static_cast<float>(x));
  put_float(static_cast<float>(static_cast<int>(x)));
  double d = static_cast<double>(f) * g + 0.5;
  put(static_cast<uint32_t>(__double_as_longlong(d)));
  put_float(static_cast<float>(d));
  // number formats of numerics.h, and the packing wrappers
  put(ptx::pack_pair(f, g, BFloat16{}));
  put(ptx::pack_pair(f, g, Half{}));
  put(to_bfloat16(f).bits);
  put(to_half(f).bits);
  put_float(to_float(BFloat16{static_cast<uint16_t>(x)}));
  put_float(to_float(Half{static_cast<uint16_t>(x & 0xfbff)}));
  put_float(to_float(Float8E4M3{static_cast<uint8_t>(x)}));
  put_float(to_float(Float8E5M2{static_cast<uint8_t>(x & 0xfb)}));
  put(order_key(f));
  // shared memory, atomics, barriers
  if (t < 4) counts[t] = 0;
  __syncthreads();
  atomicAdd(&counts[t & 3], 1 + (t >> 5));
  atomicMax(&counts[t & 3], t >> 6);
  words[t] = x;
  __syncthreads();
  put(static_cast<uint32_t>(counts[t & 3]));
  put(words[127 - t]);
  uint4 v = *reinterpret_cast<const uint4*>(&words[t & ~3]);
  put(v.x ^ v.y ^ v.z ^ v.w);
  put(reinterpret_cast<const uint8_t*>(words)[t * 3]);
  put(static_cast<uint32_t>(static_cast<int>(reinterpret_cast<const int16_t*>(words)[t])));
  put(static_cast<uint32_t>(__syncthreads_count(x & 1)));
  put(static_cast<uint32_t>(__syncthreads_or((x & 1023) == 3)));
  put(static_cast<uint32_t>(__syncthreads_and((x & 1023) != 3)));
  put(block_reduce(x & 255u, Sum{}, 0u, tile));
  // asynchronous copy, ldmatrix, mma
  ptx::cp_async_16(tile + 4 * t, in + 4 * (t % 32), t % 5 != 0);
  ptx::cp_async_commit();
  ptx::cp_async_wait<0>();
  __syncthreads();
  put(tile[(t * 7) % (4 * kThreads)]);
  for (int i = t; i < 256; i += kThreads)
    tile[512 + i] = ptx::pack_pair(0.25f * (i % 17) - 2.0f, 0.5f * (i % 11), BFloat16{});
  __syncthreads();
  uint32_t a[4], b[4];
  ptx::ldmatrix_x4(a, tile + 512 + (lane & 15) * 8 + (lane >> 4) * 4);
  ptx::ldmatrix_x4_transposed(b, tile + 640 + (lane & 15) * 8 + (lane >> 4) * 4);
  put(a[0] ^ a[3]);
  put(b[1] + b[2]);
  float c[4] = {f, g, 1.0f, 0.0f};
  ptx::mma_m16n8k16(c, a, b[0], b[1], BFloat16{});
  put_float(c[0]);
  put_float(c[3]);
  float h[4] = {0.0f, 0.0f, 1.0f, g};
  uint32_t half_a[4];
  for (int i = 0; i < 4; i++) half_a[i] = ptx::pack_pair(static_cast<float>((lane * 3 + i) % 9), 0.5f * i, Half{});
  ptx::mma_m16n8k16(h, half_a, half_a[1], half_a[2], Half{});
  put_float(h[1]);
  put_float(h[2]);
  float e[4] = {0.0f, 1.0f, 2.0f, 3.0f};
  uint32_t tf[4];
  for (int i = 0; i < 4; i++) tf[i] = __float_as_uint(static_cast<float>((lane + i) % 7) * 0.5f);
  ptx::mma_m16n8k8_tf32(e, tf, tf[1], tf[2]);
  put_float(e[0]);
  put_float(e[2]);
  uint4 streamed = ptx::load_stream_16(in + 4 * (t % 32));
  put(streamed.y);
  // named barriers: warp 0 and 1 meet apart from 2 and 3
  words[t] = y;
  ptx::named_barrier_sync(1 + warp / 2, 64);
  put(words[t ^ 32]);
  // local arrays, loops, switches
  uint32_t local[8];
  for (int i = 0; i < 8; i++) local[i] = x * static_cast<uint32_t>(i + 1);
  put(local[y & 7]);
  uint64_t state = 0;
  for (int i = 0; i < n; i++) state = state * 6364136223846793005ull + (x ^ static_cast<uint32_t>(i));
  put(static_cast<uint32_t>(state >> 32));
  put(static_cast<uint32_t>(state));
  switch (x & 7) {
    case 0: put(1); break;
    case 1: put(x * 3); break;
    case 2: put(y); break;
    case 3: put(x ^ 5); break;
    case 4: put(y + 9); break;
    case 5: put(x / 3); break;
    default: put(x + y);
  }
  // the last thread's ticket
  __syncthreads();
  int before = t == 0 ? ptx::atomic_add_acq_rel(counter, 3) : 0;
  put(static_cast<uint32_t>(before));
  // two matrices, float8 in float16, the check for infinities and NaN
  uint32_t two[2];
  ptx::ldmatrix_x2(two, tile + 512 + (lane & 15) * 8);
  put(two[0] ^ two[1]);
  ptx::ldmatrix_x2_transposed(two, tile + 512 + (lane & 15) * 8);
  put(two[0] + two[1]);
  put(ptx::half_pair_from_e4m3(x & 0xf7f7u));
  put((ptx::half_pair_from_e4m3(0x7f00u | (x & 0x80u)) & 0x7c000000u) == 0x7c000000u);
  float low, high;
  ptx::floats_from_half_pair(half_a[2], low, high);
  put_float(low + 3.0f * high);
  put(ptx::multiply_half_pairs(half_a[1], half_a[3]));
  put((ptx::add_zero_times(x | 0x7f80u, 0, BFloat16{}) & 0x7fff7fffu) != 0);
  put((ptx::add_zero_times(x & 0xff7fff7fu, 0, BFloat16{}) & 0x7fff7fffu) != 0);
  put((ptx::add_zero_times(x | 0x7c000000u, 0, Half{}) & 0x7fff7fffu) != 0);
  put((ptx::add_zero_times(x & 0xfbfffbffu, 0, Half{}) & 0x7fff7fffu) != 0);
  put(static_cast<uint32_t>(ptx::in_place(lane)));
  put(static_cast<uint32_t>(row));
}

}  // namespace specdec

extern "C" __attribute__((visibility("default"))) int run_intrinsics(const uint32_t* in, uint32_t* out, int* counter,
                                                                     int n) {
  SPECDEC_LAUNCH(specdec::intrinsics_kernel, dim3(1), dim3(specdec::kThreads), 4096, 0, in, out, counter, n);
  return specdec::kRows;
}
