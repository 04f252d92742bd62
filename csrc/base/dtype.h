// The one list of element types, with the C++ type of each. Folds, casts, bindings and tests
// iterate over it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>
#include <tuple>
#include <type_traits>

#include "base/element.h"

namespace farandole {

enum class DType : uint8_t {
  float16,
  bfloat16,
  float32,
  float64,
  int8,
  int16,
  int32,
  int64,
  uint8,
  uint16,
  uint32,
  uint64,
  boolean,
};

/// The arithmetic of a type, which decides its accumulate type and which operations make sense.
enum class DTypeKind : uint8_t { half, floating, integer, boolean };

/// Other libraries' codes for a type: 0 and "" where a library has no such type.
struct DTypeCodes {
  char buffer;                       // Python's buffer protocol; of integers, with the size
  uint8_t dlpack;                    // DLDataTypeCode; the bits go with it
  int32_t xla;                       // PrimitiveType
  int32_t tensorflow;                // DataType
  std::string_view tensorflow_word;  // in an op's definition
};

template <typename T>
inline constexpr DTypeKind kKindOf = std::is_integral_v<T>         ? DTypeKind::integer
                                     : std::is_floating_point_v<T> ? DTypeKind::floating
                                     : FloatingElement<T>          ? DTypeKind::half
                                                                   : DTypeKind::boolean;

struct DTypeRow {
  DType dtype;
  std::string_view name;  // numpy's name
  size_t bytes;
  DTypeKind kind;
  DTypeCodes codes;
};

/// A row as it is written: `T` is the type of its elements.
template <typename T>
struct DTypeOf : DTypeRow {
  constexpr DTypeOf(DType d, std::string_view n, DTypeCodes c)
      : DTypeRow{d, n, sizeof(T), kKindOf<T>, c} {}
};

inline constexpr std::tuple kTypedRows{
    DTypeOf<NarrowFloat<kFloat16>>{DType::float16, "float16", {'e', 2, 10, 19, "half"}},
    DTypeOf<NarrowFloat<kBFloat16>>{DType::bfloat16, "bfloat16", {'E', 4, 16, 14, "bfloat16"}},
    DTypeOf<float>{DType::float32, "float32", {'f', 2, 11, 1, "float"}},
    DTypeOf<double>{DType::float64, "float64", {'d', 2, 12, 2, "double"}},
    DTypeOf<int8_t>{DType::int8, "int8", {'b', 0, 2, 6, "int8"}},
    DTypeOf<int16_t>{DType::int16, "int16", {'h', 0, 3, 5, "int16"}},
    DTypeOf<int32_t>{DType::int32, "int32", {'i', 0, 4, 3, "int32"}},
    DTypeOf<int64_t>{DType::int64, "int64", {'q', 0, 5, 9, "int64"}},
    DTypeOf<uint8_t>{DType::uint8, "uint8", {'B', 1, 6, 4, "uint8"}},
    DTypeOf<uint16_t>{DType::uint16, "uint16", {'H', 1, 7, 17, "uint16"}},
    DTypeOf<uint32_t>{DType::uint32, "uint32", {'I', 1, 8, 22, "uint32"}},
    DTypeOf<uint64_t>{DType::uint64, "uint64", {'Q', 1, 9, 23, "uint64"}},
    DTypeOf<Boolean>{DType::boolean, "bool", {'?', 6, 1, 10, "bool"}},
};

/// make(row) of every row, in an array to be indexed by dtype.
template <typename Make>
constexpr auto by_dtype(Make make) {
  return std::apply([&](const auto&... rows) { return std::array{make(rows)...}; }, kTypedRows);
}

inline constexpr auto kDTypes = by_dtype([](const DTypeRow& r) { return r; });

constexpr size_t index(DType dtype) { return static_cast<size_t>(dtype); }
constexpr const DTypeRow& row(DType dtype) { return kDTypes[index(dtype)]; }
constexpr size_t size_of(DType dtype) { return row(dtype).bytes; }
constexpr std::string_view name_of(DType dtype) { return row(dtype).name; }

static_assert([] {
  size_t i = 0;
  for (const DTypeRow& r : kDTypes)
    if (index(r.dtype) != i++) return false;
  return true;
}());  // in the order of the enumerators

/// The type of the first row for which `is_it(row)` holds.
template <typename IsIt>
constexpr std::optional<DType> dtype_where(IsIt is_it) {
  for (const DTypeRow& r : kDTypes)
    if (is_it(r)) return r.dtype;
  return std::nullopt;
}

constexpr std::optional<DType> dtype_named(std::string_view name) {
  return dtype_where([&](const DTypeRow& r) { return r.name == name; });
}

}  // namespace farandole
