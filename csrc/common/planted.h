// Planted bugs: faults that tests compile into the shipped kernels to show that the CUDA-on-CPU checks
// or the suites catch them (docs/cuda_on_cpu.md, tests/test_cuda_on_cpu_bugs.py, tests/test_attention_mutants.py). In
// every real build `planted` is false at compile time and the branches vanish. nvcc: -DSPECDEC_PLANTED_BUG=<number>.
// g++: -DSPECDEC_PLANTED_AT_RUN_TIME, one build for all of them.
#pragma once

#include "hostdevice.h"

#ifndef SPECDEC_PLANTED_BUG
#define SPECDEC_PLANTED_BUG 0
#endif
#if defined(SPECDEC_PLANTED_AT_RUN_TIME)
namespace emulated {
extern int planted_bug;  // set by emulated_plant
}
#endif

namespace specdec {

enum class Bug : int {
  none = 0,
  no_barrier_before_read = 1,   // shared memory read before the barrier that publishes it
  no_barrier_before_reuse = 2,  // scratch overwritten while others still read it
  divergent_barrier = 3,        // a barrier that part of the block reaches elsewhere
  divergent_shuffle = 4,        // a full-mask shuffle that part of the warp skips
  no_syncwarp = 5,              // lanes exchange through shared memory without __syncwarp
  shared_out_of_bounds = 6,
  global_out_of_bounds = 7,
  block_race = 8,              // two blocks write the same global rows
  uninitialised_output = 9,    // rows of an output are left as they were
  wait_group_off_by_one = 10,  // a tile is used one cp.async group too early
  refill_too_early = 11,       // a stage is refilled while other warps still read it
  swapped_mma_operands = 12,   // in the inline PTX only: the source model is right
  wrong_ldmatrix_address = 13,
  ticket_without_fence = 14,  // the last block reads partial results it never acquired
  counter_not_reset = 15,     // the ticket counter is left as the launch ended
  uninitialised_shared = 16,  // scratch is read where nothing was written
  missing_wait = 17,          // cp.async copies that are never waited for
  shift_past_word = 18,       // x86 takes the shift modulo 32, a GPU gives 0
  // Of CPU op and GPU kernels alike (tests/test_attention_mutants.py):
  mask_ignored = 19,
  mask_word_off_by_one = 20,
  mask_bit_order = 21,  // most significant bit first
  window_by_slot = 22,  // a window counts slots where it has to count depth
  // Of the Hopper kernel; 11 as well:
  missing_mbarrier_wait = 23,
  wrong_parity = 24,         // a wait that names the phase before
  release_before_wait = 25,  // a stage is given back while products still read it
  no_proxy_fence = 26,       // products of tiles that ordinary copies wrote, unfenced
  short_announcement = 27,   // fewer bytes than the copy engine brings
  long_announcement = 28,    // more
  wrong_coordinate = 29,     // always the first tile of a page
};

#if defined(SPECDEC_PLANTED_AT_RUN_TIME)
inline bool planted(Bug bug) {
  return ::emulated::planted_bug == static_cast<int>(bug);
}
#else
SPECDEC_HD constexpr bool planted(Bug bug) {
  return SPECDEC_PLANTED_BUG == static_cast<int>(bug);
}
#endif

}  // namespace specdec
