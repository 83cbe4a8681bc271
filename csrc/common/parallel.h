// Items over the CPU's threads, in order within a thread, with stealing: a thread that woke late or drew dear items
// leaves the end of its share to the others.
#pragma once
#include <torch/csrc/stable/ops.h>

#include <atomic>
#include <vector>

namespace specdec {

// body(item, the item this thread probably takes next or -1). Which thread takes an item depends on time: bodies may
// not.
template <class Body>
void share_items(int64_t count, Body&& body) {
  const int64_t threads = torch::stable::get_num_threads(), shares = threads < count ? threads : count;
  if (shares <= 1) {
    for (int64_t i = 0; i < count; i++) body(i, i + 1 < count ? i + 1 : -1);
    return;
  }
  struct alignas(64) Share {
    std::atomic<uint64_t> left;  // first << 32 | end
  };
  std::vector<Share> left(shares);
  for (int64_t s = 0; s < shares; s++)
    left[s].left = static_cast<uint64_t>(s * count / shares) << 32 | (s + 1) * count / shares;
  // The first item of a share, or the last one for a thief; -1 where it is empty.
  auto take = [](Share& share, bool own, int64_t* next) {
    uint64_t seen = share.left.load();
    for (;;) {
      uint64_t first = seen >> 32, end = seen & 0xFFFFFFFFu;
      if (first >= end) return int64_t{-1};
      uint64_t rest = own ? (first + 1) << 32 | end : first << 32 | (end - 1);
      if (!share.left.compare_exchange_weak(seen, rest)) continue;
      *next = own && first + 1 < end ? static_cast<int64_t>(first + 1) : -1;
      return static_cast<int64_t>(own ? first : end - 1);
    }
  };
  torch::stable::parallel_for(0, shares, 1, [&](int64_t begin, int64_t end) {
    int64_t next = -1;
    for (int64_t s = begin; s < end; s++)
      for (int64_t i; (i = take(left[s], true, &next)) >= 0;) body(i, next);
    for (int64_t s = 0; s < shares; s++)
      for (int64_t i; (i = take(left[s], false, &next)) >= 0;) body(i, next);
  });
}

}  // namespace specdec
