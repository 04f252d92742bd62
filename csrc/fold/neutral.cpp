#include "fold/neutral.h"

#include <array>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/half.h"

namespace farandole {
namespace {

/// The bits of one element for each formula, little end first, as elements lie.
using Row = std::array<uint64_t, kFormulas>;

template <typename T>
constexpr Row row_of() {
  uint64_t one = 1, most = 1, least = 0;
  if constexpr (FloatingElement<T>) {
    one = convert<kFloat32, kFormatOf<T>>(bits_of(1.0F));
    most = kFormatOf<T>.infinity();
    least = kFormatOf<T>.sign() | most;
  } else if constexpr (std::is_integral_v<T>) {
    most = static_cast<uint64_t>(std::numeric_limits<T>::max());
    least = static_cast<uint64_t>(int64_t{std::numeric_limits<T>::lowest()});
  }
  return {0, one, most, least};
}

constexpr auto kRows = by_dtype([]<typename T>(const DTypeOf<T>&) { return row_of<T>(); });

}  // namespace

void fill_neutral(std::byte* data, size_t count, DType dtype, ReduceOp op) {
  const uint64_t value = kRows[index(dtype)][index(row(op).formula)];
  const size_t bytes = size_of(dtype);
  if (value == 0) {
    if (count > 0) std::memset(data, 0, count * bytes);
    return;
  }
  for (size_t i = 0; i < count; ++i) std::memcpy(data + i * bytes, &value, bytes);
}

}  // namespace farandole
