#include "fold/neutral.h"

#include <cstdint>
#include <cstring>
#include <limits>

namespace farandole {
namespace {

/// One element of each type: {for product, for min, for max}.
struct Row {
  uint64_t one, most, least;
};

template <typename T>
uint64_t bits_of(T value) {
  uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);  // little end first, as the elements lie
  return bits;
}

template <typename T>
Row numbers() {
  using Limits = std::numeric_limits<T>;
  if constexpr (Limits::has_infinity)
    return {bits_of(T{1}), bits_of(Limits::infinity()), bits_of(-Limits::infinity())};
  else
    return {bits_of(T{1}), bits_of(Limits::max()), bits_of(Limits::lowest())};
}

Row row_of(DType dtype) {
  switch (dtype) {
    case DType::float16:
      return {0x3c00, 0x7c00, 0xfc00};
    case DType::bfloat16:
      return {0x3f80, 0x7f80, 0xff80};
    case DType::float32:
      return numbers<float>();
    case DType::float64:
      return numbers<double>();
    case DType::int8:
      return numbers<int8_t>();
    case DType::int16:
      return numbers<int16_t>();
    case DType::int32:
      return numbers<int32_t>();
    case DType::int64:
      return numbers<int64_t>();
    case DType::uint8:
      return numbers<uint8_t>();
    case DType::uint16:
      return numbers<uint16_t>();
    case DType::uint32:
      return numbers<uint32_t>();
    case DType::uint64:
      return numbers<uint64_t>();
    case DType::boolean:
      return {1, 1, 0};
  }
  return {};
}

}  // namespace

void fill_neutral(std::byte* data, size_t count, DType dtype, ReduceOp op) {
  const Row row = row_of(dtype);
  const uint64_t value = op == ReduceOp::product ? row.one
                         : op == ReduceOp::min   ? row.most
                         : op == ReduceOp::max   ? row.least
                                                 : 0;
  const size_t bytes = size_of(dtype);
  if (value == 0) {
    if (count > 0) std::memset(data, 0, count * bytes);
    return;
  }
  for (size_t i = 0; i < count; ++i) std::memcpy(data + i * bytes, &value, bytes);
}

}  // namespace farandole
