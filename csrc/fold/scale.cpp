// Prescale, postscale and mean.
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <limits>
#include <type_traits>

#include "base/copy.h"
#include "base/half.h"
#include "fold/cast.h"
#include "fold/float_mode.h"
#include "fold/fold.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

/// Toward zero; beyond the ends of T, the end. Not a number: 0.
template <typename T>
T saturated(double value) {
  using Limits = std::numeric_limits<T>;
  constexpr double kLowest = static_cast<double>(Limits::lowest());  // exact: 0 or -2^n
  // NOLINTNEXTLINE(bugprone-integer-division): the half of 2^n - 1, plus one
  constexpr double kAbove = 2.0 * static_cast<double>(Limits::max() / 2 + 1);  // 2^n
  if (value >= kAbove) return Limits::max();
  if (value <= kLowest) return Limits::lowest();
  return value == value ? static_cast<T>(value) : T{0};
}

template <typename T>
void scale_integers(std::byte* out, const std::byte* in, size_t count, const Scale& by) {
  using Wide = std::conditional_t<std::is_signed_v<T>, int64_t, uint64_t>;
  const auto divisor = static_cast<Wide>(by.divide > 1 ? by.divide : 1);
  const FloatMode mode;
  for (size_t i = 0; i < count; ++i) {
    T value;
    std::memcpy(&value, in + i * sizeof(T), sizeof(T));
    // Beyond 2^53 not every integer is a double: a factor of one must not round.
    if (by.factor != 1) value = saturated<T>(static_cast<double>(value) * by.factor);
    if (divisor > 1) value = static_cast<T>(static_cast<Wide>(value) / divisor);
    std::memcpy(out + i * sizeof(T), &value, sizeof(T));
  }
}

void scale_booleans(std::byte* out, const std::byte* in, size_t count, const Scale& by) {
  for (size_t i = 0; i < count; ++i) out[i] = std::byte{in[i] != std::byte{0} && by.factor != 0};
}

using ScaleFunction = void (*)(std::byte* out, const std::byte* in, size_t count, const Scale& by);

/// Null for floats: best_kernels() has theirs.
constexpr auto kScales = by_dtype([]<typename T>(const DTypeOf<T>&) -> ScaleFunction {
  if constexpr (std::is_integral_v<T>)
    return scale_integers<T>;
  else
    return FloatingElement<T> ? nullptr : scale_booleans;
});

}  // namespace

void scale(std::byte* out, const std::byte* in, size_t count, DType dtype, const Scale& by) {
  if (by.is_identity()) {
    if (out != in) copy_bytes(out, in, count * size_of(dtype));
    return;
  }
  if (FloatScaleFunction scale_floats = best_kernels().scale[index(dtype)])
    return scale_floats(out, in, count, factor_of(by.factor));
  kScales[index(dtype)](out, in, count, by);
}

void copy_scaled(std::byte* out, const std::byte* in, size_t count, DType dtype, double factor) {
  scale(out, in, count, dtype, {.factor = factor});
}

Scales scales_for(DType dtype, ReduceOp op, double prescale, double postscale, int size) {
  Scales scales{.leaf = {.factor = prescale}, .finish = {.factor = postscale}};
  if (op != ReduceOp::mean) return scales;
  if (row(dtype).kind == DTypeKind::integer) {
    scales.finish.divide = size;
    return scales;
  }
  const FloatMode mode;
  volatile double share = 1.0 / size;  // volatile: the arithmetic stays inside the mode
  share = postscale * share;
  scales.finish.factor = share;
  return scales;
}

}  // namespace farandole
