// Apart from the rest of scale.cpp: what prepares kernels for devices needs this alone.
#include "base/half.h"
#include "fold/cast.h"
#include "fold/kernels.h"

namespace farandole {

/// In integers, so that no floating-point mode can bend it.
Factor factor_of(double factor) {
  const auto bits = static_cast<uint32_t>(convert<kFloat64, kFloat32>(bits_of(factor)));
  return {float_from_bits(bits), factor};
}

}  // namespace farandole
