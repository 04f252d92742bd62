// Included by multimem.h: as CUDA gives it. PTX ISA 8.2, sm_90.
#pragma once

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
#error "multimem instructions take compute capability 9.0"
#endif

namespace farandole::cuda {

/// Earlier accesses at other addresses of the same memory come before later ones.
FARANDOLE_DEVICE void order_addresses() { asm volatile("fence.proxy.alias;" ::: "memory"); }

// Whole packs. Halves are added as float32, and rounded once.
#define FARANDOLE_LD_REDUCE_PACK(what)                                                  \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." what " {%0, %1, %2, %3}, [%4];" \
               : "=r"(bits.words[0]), "=r"(bits.words[1]), "=r"(bits.words[2]),         \
                 "=r"(bits.words[3])                                                    \
               : "l"(from)                                                              \
               : "memory")
template <typename E>
FARANDOLE_DEVICE void load_sum(Pack& bits, size_t from) {
  if constexpr (std::is_same_v<E, Float16>)
    FARANDOLE_LD_REDUCE_PACK("add.acc::f32.v4.f16x2");
  else if constexpr (std::is_same_v<E, BFloat16>)
    FARANDOLE_LD_REDUCE_PACK("add.acc::f32.v4.bf16x2");
  else
    FARANDOLE_LD_REDUCE_PACK("add.v4.f32");
}
#undef FARANDOLE_LD_REDUCE_PACK

// Elements one by one: there are no vectors of these.
#define FARANDOLE_LD_REDUCE(what, constraint, value)                      \
  asm volatile("multimem.ld_reduce.relaxed.sys.global." what " %0, [%1];" \
               : "=" constraint(value)                                    \
               : "l"(from)                                                \
               : "memory")
template <Formula formula>
FARANDOLE_DEVICE void load_folded_one(double& value, size_t from) {
  FARANDOLE_LD_REDUCE("add.f64", "d", value);
}
#define FARANDOLE_LOAD_FOLDED_ONE(E, constraint, sum, least, most) \
  template <Formula formula>                                       \
  FARANDOLE_DEVICE void load_folded_one(E& value, size_t from) {   \
    if constexpr (formula == Formula::add)                         \
      FARANDOLE_LD_REDUCE(sum, constraint, value);                 \
    else if constexpr (formula == Formula::smaller)                \
      FARANDOLE_LD_REDUCE(least, constraint, value);               \
    else                                                           \
      FARANDOLE_LD_REDUCE(most, constraint, value);                \
  }
FARANDOLE_LOAD_FOLDED_ONE(int32_t, "r", "add.s32", "min.s32", "max.s32")
FARANDOLE_LOAD_FOLDED_ONE(uint32_t, "r", "add.u32", "min.u32", "max.u32")
// Modulo 2^64 the sum is that of unsigned ones.
FARANDOLE_LOAD_FOLDED_ONE(int64_t, "l", "add.u64", "min.s64", "max.s64")
FARANDOLE_LOAD_FOLDED_ONE(uint64_t, "l", "add.u64", "min.u64", "max.u64")
#undef FARANDOLE_LOAD_FOLDED_ONE
#undef FARANDOLE_LD_REDUCE

template <typename E, Formula formula>
FARANDOLE_DEVICE Packed<E> load_folded(const Packed<E>* from) {
  const size_t address = global(from);
  if constexpr (std::is_arithmetic_v<E> && !std::is_same_v<E, float>) {
    Packed<E> unit;
    FARANDOLE_UNROLL
    for (uint32_t i = 0; i < kPerPack<E>; ++i) {
      E value;
      load_folded_one<formula>(value, address + i * sizeof(E));
      unit.bits[i] = bits_as<BitsOfElement<E>>(value);
    }
    return unit;
  } else {
    Pack bits;
    load_sum<E>(bits, address);
    return bits_as<Packed<E>>(bits);
  }
}

/// For any type: the bits are not interpreted.
template <typename U>
FARANDOLE_DEVICE void store_to_all(U* to, const U& unit) {
  const Pack bits = bits_as<Pack>(unit);
  asm volatile("multimem.st.relaxed.sys.global.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(global(to)),
               "r"(bits.words[0]), "r"(bits.words[1]), "r"(bits.words[2]), "r"(bits.words[3])
               : "memory");
}

}  // namespace farandole::cuda
