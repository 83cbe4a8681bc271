// What the lanes of a vector Philox share: the keys of its rounds and those state words of rounds 1 and 2 that do not
// depend on the block.
#pragma once
#include "noise.h"

namespace specdec {

struct PhiloxKeys {
  uint32_t round[20];                          // k0, k1 of every round
  uint32_t counter[3];                         // position low, position high << 8 | purpose, salt
  uint32_t first2, second0, second2, second3;  // xor-ed into c2 of round 1; into c0, c2 of round 2; c3 of round 2

  explicit PhiloxKeys(const NoiseKey& key) {
    uint64_t position = static_cast<uint64_t>(key.position), seed = static_cast<uint64_t>(key.seed);
    counter[0] = static_cast<uint32_t>(position);
    counter[1] = static_cast<uint32_t>(position >> 32) << 8 | key.purpose;
    counter[2] = key.salt;
    uint32_t k0 = static_cast<uint32_t>(seed), k1 = static_cast<uint32_t>(seed >> 32);
    for (int r = 0; r < 10; r++, k0 += 0x9E3779B9u, k1 += 0xBB67AE85u) {
      round[2 * r] = k0;
      round[2 * r + 1] = k1;
    }
    // round 1: c0 = hi1 ^ position ^ k0 and c1 = lo1 are the same for every block
    uint32_t c0 = mul_hi(0xCD9E8D57u, counter[1]) ^ counter[0] ^ static_cast<uint32_t>(round[0]);
    uint32_t c1 = 0xCD9E8D57u * counter[1];
    first2 = counter[2] ^ round[1];
    // round 2: so are the product of c0 and what it goes into
    second0 = c1 ^ round[2];
    second2 = mul_hi(0xD2511F53u, c0) ^ round[3];
    second3 = 0xD2511F53u * c0;
  }
};

}  // namespace specdec
