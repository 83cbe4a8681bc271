// Which vector extensions the running CPU has: CPU kernels are compiled for several and chosen here at run time.
#pragma once
#include <atomic>

namespace specdec {

enum class Isa : int { scalar = 0, avx2 = 1, avx512 = 2, avx512_bf16 = 3, amx = 4 };

inline Isa detect_isa() {
#if defined(__x86_64__)
  __builtin_cpu_init();
  bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
                __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq");
  if (avx512 && __builtin_cpu_supports("avx512bf16")) return Isa::avx512_bf16;
  if (avx512) return Isa::avx512;
  if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"))
    return Isa::avx2;
#endif
  return Isa::scalar;
}

// AMX tiles for bfloat16: the CPU has them and the kernel lets this process use them (it asks for the permission).
bool amx_usable();

// Tests lower the limit (never raise it) through specdec_limit_isa in cpu_isa.cpp.
std::atomic<int>& isa_limit();
Isa isa();

}  // namespace specdec
