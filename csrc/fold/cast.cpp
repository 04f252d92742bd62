// Between halves and float32 by the vector loops; float64 element by element, rounded once.
#include "fold/cast.h"

#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>

#include "base/copy.h"
#include "base/error.h"
#include "base/half.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

template <FloatFormat from, FloatFormat to>
void cast_each(std::byte* out, const std::byte* in, size_t count) {
  for (size_t i = 0; i < count; ++i) {
    BitsOf<from> bits;
    std::memcpy(&bits, in + i * sizeof bits, sizeof bits);
    const auto converted = static_cast<BitsOf<to>>(convert<from, to>(bits));
    std::memcpy(out + i * sizeof converted, &converted, sizeof converted);
  }
}

/// From each to each; null where one of them is no floating-point type.
constexpr auto kCasts = by_dtype([]<typename From>(const DTypeOf<From>&) {
  return by_dtype([]<typename To>(const DTypeOf<To>&) -> CastFunction {
    if constexpr (FloatingElement<From> && FloatingElement<To>)
      return cast_each<kFormatOf<From>, kFormatOf<To>>;
    else
      return nullptr;
  });
});

}  // namespace

void cast(std::byte* out, DType out_dtype, const std::byte* in, DType in_dtype, size_t count) {
  if (out_dtype == in_dtype) {
    copy_bytes(out, in, count * size_of(in_dtype));
    return;
  }
  CastFunction function = nullptr;
  if (out_dtype == DType::float32) function = best_kernels().widen[index(in_dtype)];
  if (in_dtype == DType::float32) function = best_kernels().narrow[index(out_dtype)];
  if (function == nullptr) function = kCasts[index(in_dtype)][index(out_dtype)];
  if (function == nullptr)
    throw Error(ErrorCode::invalid_argument, "no cast from " + std::string(name_of(in_dtype)) +
                                                 " to " + std::string(name_of(out_dtype)));
  function(out, in, count);
}

}  // namespace farandole
