// The floating-point mode our arithmetic is defined in, for the length of a scope.
#pragma once

#if defined(__x86_64__)
#include <xmmintrin.h>
#else
#include <cfenv>
#endif

namespace farandole {

/// Round to nearest, subnormals kept, exceptions masked, whatever the calling thread has set;
/// frameworks flush subnormals to zero per thread, and the bits must not depend on that.
///
/// The mode is no data: a compiler may move arithmetic across its change. Operands must be loaded
/// from memory and results stored to memory inside the scope; the fences order those.
///
/// Always inlined: the vector variants of the folds must not share one copy of it.
#if defined(__x86_64__)
class FloatMode {
 public:
  [[gnu::always_inline]] FloatMode() : saved_(_mm_getcsr()), differs_((saved_ & ~kFlags) != kMode) {
    if (differs_) _mm_setcsr(kMode);  // writing costs tens of cycles, reading a few
    asm volatile("" ::: "memory");
  }
  [[gnu::always_inline]] ~FloatMode() {
    asm volatile("" ::: "memory");
    if (differs_) _mm_setcsr(saved_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  static constexpr unsigned kMode = 0x1f80;   // every exception masked, all else zero
  static constexpr unsigned kFlags = 0x003f;  // exceptions seen so far: no part of the mode
  unsigned saved_;
  bool differs_;
};
#else
class FloatMode {
 public:
  [[gnu::always_inline]] FloatMode() {
    std::fegetenv(&saved_);
    std::fesetenv(FE_DFL_ENV);
    asm volatile("" ::: "memory");
  }
  [[gnu::always_inline]] ~FloatMode() {
    asm volatile("" ::: "memory");
    std::fesetenv(&saved_);
  }
  FloatMode(const FloatMode&) = delete;
  FloatMode& operator=(const FloatMode&) = delete;

 private:
  std::fenv_t saved_;
};
#endif

}  // namespace farandole
