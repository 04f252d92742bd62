// The tables of loops that this build has, and those that this processor runs.
#ifdef FARANDOLE_HAS_AVX2
#include <cpuid.h>
#endif

#include <array>
#include <cstddef>
#include <span>
#include <string_view>

#include "fold/fold.h"
#include "fold/kernels.h"

namespace farandole {
namespace {

struct InstructionSet {
  std::string_view name;
  const Kernels* kernels;
  bool (*runs_here)();
};

#ifdef FARANDOLE_HAS_AVX2
// The processor itself is asked: not every compiler's __builtin_cpu_supports knows all of these,
// and zig's knows none.

struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf, unsigned subleaf) {
  Registers r;
  if (__get_cpuid_count(leaf, subleaf, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

constexpr bool bit(unsigned word, unsigned number) { return (word >> number & 1) != 0; }

/// Whether the kernel keeps these states of registers (XCR0) when it switches threads.
bool keeps(unsigned states) {
  constexpr unsigned kOsxsave = 27;
  if (!bit(cpuid(1, 0).c, kOsxsave)) return false;
  unsigned low = 0, high = 0;
  __asm__("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
  return (low & states) == states;
}

bool has_avx2() {
  const unsigned basic = cpuid(1, 0).c;
  const bool avx = bit(basic, 28), f16c = bit(basic, 29), avx2 = bit(cpuid(7, 0).b, 5);
  return avx && f16c && avx2 && keeps(0x06);
}
#endif

#ifdef FARANDOLE_HAS_AVX512
bool has_avx512() {
  const unsigned b = cpuid(7, 0).b;
  const bool f = bit(b, 16), dq = bit(b, 17), bw = bit(b, 30), vl = bit(b, 31);
  return f && dq && bw && vl && keeps(0xe6);
}
#endif

constexpr InstructionSet kInstructionSets[] = {
    {"baseline", &kBaselineKernels, [] { return true; }},
#ifdef FARANDOLE_HAS_AVX2
    {"avx2", &kAvx2Kernels, has_avx2},
#endif
#ifdef FARANDOLE_HAS_AVX512
    {"avx512", &kAvx512Kernels, has_avx512},
#endif
#ifdef FARANDOLE_HAS_AVX512_BF16
    {"avx512_bf16", &kAvx512Bf16Kernels, [] { return has_avx512() && bit(cpuid(7, 1).a, 5); }},
#endif
};

/// The tables that this processor runs, slowest first. The processor is asked once.
struct Found {
  std::array<std::string_view, std::size(kInstructionSets)> names;
  size_t count = 0;
  const Kernels* best = nullptr;

  Found() {
    for (const InstructionSet& set : kInstructionSets) {
      if (!set.runs_here()) continue;
      names[count++] = set.name;
      best = set.kernels;
    }
  }
};

const Found& found() {
  static const Found once;
  return once;
}

}  // namespace

const Kernels& best_kernels() { return *found().best; }

const Kernels* kernels_for(std::string_view instruction_set) {
  for (const InstructionSet& set : kInstructionSets)
    if (set.name == instruction_set && set.runs_here()) return set.kernels;
  return nullptr;
}

std::span<const std::string_view> instruction_sets() {
  return {found().names.data(), found().count};
}

std::string_view best_instruction_set() { return instruction_sets().back(); }

FoldFunction fold_for(DType dtype, ReduceOp op) {
  return best_kernels().fold[index(dtype)][index(op)];
}

FoldFunction fold_for(DType dtype, ReduceOp op, std::string_view instruction_set) {
  const Kernels* kernels = kernels_for(instruction_set);
  return kernels == nullptr ? nullptr : kernels->fold[index(dtype)][index(op)];
}

}  // namespace farandole
