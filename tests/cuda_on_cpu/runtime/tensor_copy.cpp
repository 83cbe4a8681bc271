// Tensor maps and the copies by them: the encoder with the driver's limits, and cp.async.bulk.tensor (tiled).
//
// A map says where element (c0, .., c4) lies: address + c0 size of an element + sum of ci stride[i - 1]. A copy takes
// the box at `first`, dimension 0 fastest, and puts its rows of box[0] elements one behind the other; in the 128-byte
// swizzle bits 4-6 of the shared address are then xor-ed with bits 7-9. Modelled: rows of 128 bytes in that swizzle.
#include "c_api.h"
#include "hopper.h"
#include "internal.h"

namespace emulated {

constexpr uint32_t kMark = 0x7e4502a9;  // of a map that encode_tensor_map has made
static uint64_t tensor_copies = 0;

struct TensorMap {  // in the opaque words of a CUtensorMap
  uint32_t mark, rank, element;
  const char* address;
  uint64_t size[5], stride[5];  // stride[0]: of an element; in bytes
  uint16_t box[5];
};
static_assert(sizeof(TensorMap) <= sizeof(CUtensorMap));

static uint32_t size_of(CUtensorMapDataType type) {
  switch (type) {
    case CU_TENSOR_MAP_DATA_TYPE_UINT8: return 1;
    case CU_TENSOR_MAP_DATA_TYPE_UINT16:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT16:
    case CU_TENSOR_MAP_DATA_TYPE_BFLOAT16: return 2;
    case CU_TENSOR_MAP_DATA_TYPE_UINT32:
    case CU_TENSOR_MAP_DATA_TYPE_INT32:
    case CU_TENSOR_MAP_DATA_TYPE_FLOAT32: return 4;
    default: return 0;  // not modelled
  }
}

CUresult encode_tensor_map(CUtensorMap* out, CUtensorMapDataType type, cuuint32_t rank, void* address,
                           const cuuint64_t* size, const cuuint64_t* stride, const cuuint32_t* box,
                           const cuuint32_t* steps, CUtensorMapInterleave interleave, CUtensorMapSwizzle swizzle,
                           CUtensorMapL2promotion, CUtensorMapFloatOOBfill fill) {
  TensorMap map{};
  map.mark = kMark;
  map.rank = rank;
  map.element = size_of(type);
  map.address = static_cast<const char*>(address);
  bool good = rank >= 1 && rank <= 5 && map.element && interleave == CU_TENSOR_MAP_INTERLEAVE_NONE &&
              swizzle == CU_TENSOR_MAP_SWIZZLE_128B && fill == CU_TENSOR_MAP_FLOAT_OOB_FILL_NONE &&
              reinterpret_cast<uintptr_t>(out) % 64 == 0 && reinterpret_cast<uintptr_t>(address) % 16 == 0;
  for (uint32_t i = 0; good && i < rank; i++) {
    map.size[i] = size[i];
    map.stride[i] = i ? stride[i - 1] : map.element;
    map.box[i] = static_cast<uint16_t>(box[i]);
    good = size[i] >= 1 && size[i] <= uint64_t{1} << 32 && box[i] >= 1 && box[i] <= 256 && steps[i] == 1 &&
           (i == 0 || (map.stride[i] % 16 == 0 && map.stride[i] < uint64_t{1} << 40));
  }
  if (!good || box[0] * map.element != 128) return CUDA_ERROR_INVALID_VALUE;
  memset(out, 0, sizeof *out);
  memcpy(out, &map, sizeof map);
  return CUDA_SUCCESS;
}

__attribute__((noinline)) void tensor_copy(void* destination, const void* opaque, int rank, const int32_t* first,
                                           void* barrier, At at) {
  TensorMap map;
  if (reinterpret_cast<uintptr_t>(opaque) % 64) trap("tensor map: expected at a multiple of 64 bytes", at);
  // Path A has its parameters on the stack.
  if (config.path == Path::ptx && !in_parameters(opaque, sizeof(CUtensorMap)))
    trap("tensor map: expected a __grid_constant__ parameter of the kernel", at);
  memcpy(&map, opaque, sizeof map);
  if (map.mark != kMark || map.rank != static_cast<uint32_t>(rank))
    trap("tensor map: never encoded, or of another rank", at);
  Block* block = self()->owner;
  const auto start = static_cast<size_t>(static_cast<char*>(destination) - block->arena);
  size_t rows = 1;
  for (int i = 1; i < rank; i++) rows *= map.box[i];
  if (start % 1024 || rows % 8)
    trap("tensor copy: the swizzle needs an address that is a multiple of 1024, and whole groups of 8 rows", at);
  std::vector<const char*> chunks(rows * 8);
  for (size_t row = 0; row < rows; row++) {
    const char* source = map.address;
    bool inside = true;
    size_t rest = row;
    for (int i = 1; i < rank; i++) {
      const int64_t c = first[i] + static_cast<int64_t>(rest % map.box[i]);
      rest /= map.box[i];
      inside &= c >= 0 && c < static_cast<int64_t>(map.size[i]);
      source += c * static_cast<int64_t>(map.stride[i]);
    }
    for (size_t chunk = 0; chunk < 8; chunk++) {
      const int64_t elements = 16 / map.element, c = first[0] + static_cast<int64_t>(chunk) * elements;
      const auto size = static_cast<int64_t>(map.size[0]);
      if ((c < 0 && c > -elements) || (c < size && c + elements > size))
        trap("tensor copy: not modelled: the tensor ends within 16 bytes", at);
      const char* from = source + c * static_cast<int64_t>(map.element);
      if (!inside || c < 0 || c >= size)
        from = nullptr;
      else if (reinterpret_cast<uintptr_t>(from) % 16)
        trap("tensor copy: not modelled: a box that begins within 16 bytes", at);
      else
        check_source_range(from, 16, at);
      chunks[row * 8 + (chunk ^ (row & 7))] = from;
    }
  }
  tensor_copies++;
  issue_bulk_copy(barrier, destination, std::move(chunks), at, __builtin_return_address(0));
}

}  // namespace emulated

extern "C" uint64_t emulated_tensor_copies() {
  return emulated::tensor_copies;
}
