// Between halves and float32 by the vector loops; float64 element by element, rounded once.
#include "fold/cast.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <type_traits>

#include "base/copy.h"
#include "base/error.h"
#include "base/half.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

template <int bytes>
using Bits =
    std::conditional_t<bytes == 2, uint16_t, std::conditional_t<bytes == 4, uint32_t, uint64_t>>;

template <FloatFormat format>
using BitsOf = Bits<(1 + format.exponent + format.mantissa) / 8>;

template <FloatFormat from, FloatFormat to>
void cast_each(std::byte* out, const std::byte* in, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    BitsOf<from> bits;
    std::memcpy(&bits, in + i * sizeof bits, sizeof bits);
    const auto converted = static_cast<BitsOf<to>>(convert<from, to>(bits));
    std::memcpy(out + i * sizeof converted, &converted, sizeof converted);
  }
}

template <FloatFormat from>
CastFunction cast_from(DType to) {
  switch (to) {
    case DType::float16:
      return cast_each<from, kFloat16>;
    case DType::bfloat16:
      return cast_each<from, kBFloat16>;
    case DType::float32:
      return cast_each<from, kFloat32>;
    case DType::float64:
      return cast_each<from, kFloat64>;
    default:
      return nullptr;
  }
}

CastFunction cast_between(DType from, DType to) {
  switch (from) {
    case DType::float16:
      return cast_from<kFloat16>(to);
    case DType::bfloat16:
      return cast_from<kBFloat16>(to);
    case DType::float32:
      return cast_from<kFloat32>(to);
    case DType::float64:
      return cast_from<kFloat64>(to);
    default:
      return nullptr;
  }
}

}  // namespace

void cast(std::byte* out, DType out_dtype, const std::byte* in, DType in_dtype, size_t count) {
  if (out_dtype == in_dtype) {
    copy_bytes(out, in, count * size_of(in_dtype));
    return;
  }
  CastFunction function = nullptr;
  if (out_dtype == DType::float32) function = best_kernels().widen[static_cast<size_t>(in_dtype)];
  if (in_dtype == DType::float32) function = best_kernels().narrow[static_cast<size_t>(out_dtype)];
  if (function == nullptr) function = cast_between(in_dtype, out_dtype);
  if (function == nullptr)
    throw Error(ErrorCode::invalid_argument, "no cast from " + std::string(name_of(in_dtype)) +
                                                 " to " + std::string(name_of(out_dtype)));
  function(out, in, count);
}

}  // namespace farandole
