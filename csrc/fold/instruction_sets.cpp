// Which tables of loops this build has, and which of them this processor runs.
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

#ifdef FARANDOLE_HAS_AVX512
bool has_avx512() {
  return bool(__builtin_cpu_supports("avx512f")) && bool(__builtin_cpu_supports("avx512bw")) &&
         bool(__builtin_cpu_supports("avx512vl")) && bool(__builtin_cpu_supports("avx512dq"));
}
#endif

#ifdef FARANDOLE_HAS_AVX2
/// clang 14's __builtin_cpu_supports does not know it. Whoever has AVX2 may use its registers.
bool has_f16c() {
  unsigned a = 0, b = 0, c = 0, d = 0;
  return __get_cpuid(1, &a, &b, &c, &d) != 0 && (c & bit_F16C) != 0;
}
#endif

constexpr InstructionSet kInstructionSets[] = {
    {"baseline", &kBaselineKernels, [] { return true; }},
#ifdef FARANDOLE_HAS_AVX2
    {"avx2", &kAvx2Kernels, [] { return bool(__builtin_cpu_supports("avx2")) && has_f16c(); }},
#endif
#ifdef FARANDOLE_HAS_AVX512
    {"avx512", &kAvx512Kernels, has_avx512},
#endif
#ifdef FARANDOLE_HAS_AVX512_BF16
    {"avx512_bf16", &kAvx512Bf16Kernels,
     [] { return has_avx512() && bool(__builtin_cpu_supports("avx512bf16")); }},
#endif
};

/// What was found, slowest first; asked of the processor once.
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
