// Address of one KV row in a paged cache, for both layouts and any strides. All products are 64-bit.
#pragma once
#include <cstdint>

#include "hostdevice.h"

namespace specdec {

// NHD: [num_pages, page_size, num_kv_heads, head_dim]; HND: [num_pages, num_kv_heads, page_size, head_dim].
struct PagedCache {
  int64_t stride_page, stride_row, stride_head;  // in elements; the last dimension is dense
  int32_t num_pages, page_size;

  SPECDEC_HD int64_t offset(int32_t page, int32_t row, int32_t head) const {
    return page * stride_page + row * stride_row + head * stride_head;
  }
};

// Slot (page * page_size + row) of logical position `position`, or -1 where the table has no valid page for it.
SPECDEC_HD int32_t slot_of(const int32_t* page_row, int32_t max_pages, int32_t page_size, int64_t position) {
  if (position < 0) return -1;
  int64_t column = position / page_size;
  if (column >= max_pages) return -1;
  int64_t page = page_row[column];
  if (page < 0 || page * page_size + page_size - 1 > 2147483647) return -1;
  return static_cast<int32_t>(page * page_size + position % page_size);
}

}  // namespace specdec
