// Coins and Gumbel noise from Philox words (keys: common/rng.h). Decisions are taken in float64: a handful a request.
#pragma once
#include <cmath>

#include "../common/rng.h"

namespace specdec {

constexpr uint32_t kPurposeTail = 0x80;  // or-ed to a purpose: the second word of a Gumbel draw in its far tail
constexpr uint32_t kTailWords = 4096;    // words below this (probability 2^-20) are refined to 64 bits
constexpr double kWord = 2.3283064365386962890625e-10;  // 2^-32

struct NoiseKey {
  int64_t seed = 0, position = 0;
  uint32_t purpose = kPurposeEmit, salt = 0;
};

// Salt of a draft draw: branches at one depth and repeated steps get independent noise; (0, 0) stays 0.
SPECDEC_HD uint32_t draft_salt(uint32_t path, int64_t step) {
  uint32_t h = path * 0x9E3779B1u + static_cast<uint32_t>(step) * 0x85EBCA77u;
  h = (h ^ (h >> 16)) * 0x85EBCA6Bu;
  h = (h ^ (h >> 13)) * 0xC2B2AE35u;
  return h ^ (h >> 16);
}

// Word i of four, by comparisons: an index would send the words through memory on a GPU.
SPECDEC_HD uint32_t word_of(const Philox& words, uint32_t i) {
  return i == 0 ? words.word[0] : i == 1 ? words.word[1] : i == 2 ? words.word[2] : words.word[3];
}

// -log1p(-u), u the midpoint of the word's cell; a small word takes a second word: 64-bit tail.
SPECDEC_HD double exponential(const NoiseKey& key, uint32_t token, uint32_t word) {
  double cell = 0.5;
  if (word < kTailWords) {
    Philox tail = draw(key.seed, key.position, key.purpose | kPurposeTail, token >> 2, key.salt);
    cell = (word_of(tail, token & 3) + 0.5) * kWord;
  }
  return -log1p(-(word + cell) * kWord);
}
SPECDEC_HD double gumbel(const NoiseKey& key, uint32_t token, uint32_t word) {
  return -log(exponential(key, token, word));
}
SPECDEC_HD double gumbel(const NoiseKey& key, uint32_t token) {
  Philox words = draw(key.seed, key.position, key.purpose, token >> 2, key.salt);
  return gumbel(key, token, word_of(words, token & 3));
}

// A coin u in (0, 1) of 64 bits, kept as u (at most 1 - 2^-53) and as log u without rounding to 0 or 1.
struct Coin {
  double u, log_u;
};

SPECDEC_HD Coin coin_from_words(uint32_t high, uint32_t low) {
  double u = (high + (low + 0.5) * kWord) * kWord;
  double rest = (~high + (~low + 0.5) * kWord) * kWord;  // 1 - u, formed in integers
  Coin coin;
  coin.u = u < 1.0 - 1.1102230246251565e-16 ? u : 1.0 - 1.1102230246251565e-16;
  coin.log_u = high < 0x80000000u ? log(u) : log1p(-rest);
  return coin;
}
SPECDEC_HD Coin coin_from_value(double u) {
  Coin coin;
  coin.u = u;
  coin.log_u = u > 0.0 ? log(u) : -__builtin_huge_val();
  return coin;
}
SPECDEC_HD Coin draw_coin(const NoiseKey& key, uint32_t trial) {
  Philox words = draw(key.seed, key.position, key.purpose, trial, key.salt);
  return coin_from_words(words.word[0], words.word[1]);
}

}  // namespace specdec
