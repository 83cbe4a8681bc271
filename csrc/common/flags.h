// Bits of the `flags` tensors: faults in data, seen on the device, never thrown.
// The same table stands in specdec_kernels/_ops.py (Flag) and docs/numerics.md.
#pragma once
#include <cstdint>

namespace specdec {
constexpr int32_t kFlagNanLogit = 1;       // NaN read as -inf
constexpr int32_t kFlagDeadRow = 2;        // a visited row has no usable logit: id 0 is emitted
constexpr int32_t kFlagInfLogit = 4;       // +inf logit: uniform over the +inf ids
constexpr int32_t kFlagTokenRange = 8;     // draft id < -1 or >= the valid vocabulary
constexpr int32_t kFlagDraftMass = 16;     // drafted token has draft probability 0 or NaN
constexpr int32_t kFlagZeroResidual = 32;  // residual is empty: the target law is sampled
constexpr int32_t kFlagTree = 64;          // malformed tree: the request is reduced to its root
constexpr int32_t kFlagParameter = 128;    // temperature, seed or filter parameter out of range
constexpr int32_t kFlagSiblings = 256;     // siblings of mixed kinds, or the same token twice
constexpr int32_t kFlagIndex = 512;        // an index tensor points outside its range
}  // namespace specdec
