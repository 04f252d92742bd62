#include "fold/update.h"

#include <cmath>
#include <cstring>

#include "fold/float_mode.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

/// Calls body(lane, element as double). Elements go to a few lanes in turn: independent sums are
/// what lets a compiler that may not reorder additions use vectors.
constexpr size_t kLanes = kNormLanes;

template <typename T, typename Body>
void by_lanes(const std::byte* elements, size_t count, Body body) {
  for (size_t at = 0; at < count; at += kLanes) {
    T values[kLanes] = {};
    const size_t here = count - at < kLanes ? count - at : kLanes;
    std::memcpy(values, elements + at * sizeof(T), here * sizeof(T));
    for (size_t i = 0; i < kLanes; ++i) body(i, static_cast<double>(values[i]));
  }
}

template <typename T>
double sum_of_squares(const std::byte* elements, size_t count) {
  const FloatMode mode;
  std::array<double, kLanes> sums{};
  by_lanes<T>(elements, count, [&](size_t lane, double x) { sums[lane] += x * x; });
  for (size_t half = kLanes / 2; half > 0; half /= 2)
    for (size_t i = 0; i < half; ++i) sums[i] += sums[i + half];
  return sums[0];
}

double larger(double most, double x) { return x > most || x != x ? x : most; }

template <typename T>
double largest_magnitude(const std::byte* elements, size_t count) {
  std::array<double, kLanes> most{};
  by_lanes<T>(elements, count,
              [&](size_t lane, double x) { most[lane] = larger(most[lane], std::fabs(x)); });
  for (const double x : most) most[0] = larger(most[0], x);
  return most[0];
}

}  // namespace

void update(UpdateKind kind, DType dtype, const UpdateArrays& arrays,
            const UpdateFactors& factors) {
  best_kernels().update[index(dtype)][static_cast<size_t>(kind)](arrays, factors);
}

double sum_of_squares(const std::byte* elements, size_t count, DType dtype) {
  return size_of(dtype) == sizeof(double) ? sum_of_squares<double>(elements, count)
                                          : sum_of_squares<float>(elements, count);
}

double largest_magnitude(const std::byte* elements, size_t count, DType dtype) {
  return size_of(dtype) == sizeof(double) ? largest_magnitude<double>(elements, count)
                                          : largest_magnitude<float>(elements, count);
}

}  // namespace farandole
