// Philox4x32-10 (Salmon et al., SC'11) and the keys of every random draw.
//
//   key     = 64-bit request seed
//   counter = (token >> 2 or trial, position low, position high << 8 | purpose, salt)
//
// One call yields the words of 4 neighbouring tokens. A draw depends on the request's seed, its output position, the
// purpose and a salt only: never on the batch, the row, the split or the padding. docs/numerics.md has the argument.
#pragma once
#include <cstdint>

#include "hostdevice.h"

namespace specdec {

struct Philox {
  uint32_t word[4];
};

// Purposes of a draw. kDraft is never reused in kEmit (except by the coupled method, which means to).
constexpr uint32_t kPurposeDraft = 0;   // proposing a token; salt = hash(parent's path, step)
constexpr uint32_t kPurposeAccept = 1;  // accept coin; trial = index among the siblings
constexpr uint32_t kPurposeEmit = 2;    // bonus token; a recovered one that the race left undecided
constexpr uint32_t kPurposePlan = 3;    // tree planning; salt = step
constexpr uint32_t kPurposeBlock = 4;   // block verification's coin; salt = step
constexpr uint32_t kPurposeRace = 5;    // recovered token: clocks of groups (sampling/race.h)

SPECDEC_HD uint32_t mul_hi(uint32_t a, uint32_t b) {
  return static_cast<uint32_t>((static_cast<uint64_t>(a) * b) >> 32);
}

SPECDEC_HD Philox philox4x32_10(uint32_t c0, uint32_t c1, uint32_t c2, uint32_t c3, uint32_t k0, uint32_t k1) {
  for (int round = 0; round < 10; round++) {
    uint32_t hi0 = mul_hi(0xD2511F53u, c0), lo0 = 0xD2511F53u * c0;
    uint32_t hi1 = mul_hi(0xCD9E8D57u, c2), lo1 = 0xCD9E8D57u * c2;
    c0 = hi1 ^ c1 ^ k0;
    c1 = lo1;
    c2 = hi0 ^ c3 ^ k1;
    c3 = lo0;
    k0 += 0x9E3779B9u;
    k1 += 0xBB67AE85u;
  }
  Philox out;
  out.word[0] = c0;
  out.word[1] = c1;
  out.word[2] = c2;
  out.word[3] = c3;
  return out;
}

// Words for tokens 4 * block .. 4 * block + 3 (or for trial `block`).
SPECDEC_HD Philox draw(int64_t seed, int64_t position, uint32_t purpose, uint32_t block, uint32_t salt) {
  uint64_t s = static_cast<uint64_t>(seed), p = static_cast<uint64_t>(position);
  return philox4x32_10(block, static_cast<uint32_t>(p), static_cast<uint32_t>(p >> 32) << 8 | purpose, salt,
                       static_cast<uint32_t>(s), static_cast<uint32_t>(s >> 32));
}

}  // namespace specdec
