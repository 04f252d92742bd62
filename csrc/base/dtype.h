// The one list of element types. Folds, casts, bindings and tests iterate over it.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <optional>
#include <string_view>

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

/// What kind of arithmetic a type has; decides its accumulate type and which operations make sense.
enum class DTypeKind : uint8_t { half, floating, integer, boolean };

/// What others call a type.
struct DTypeCodes {
  char buffer;                       // Python's buffer protocol; of integers, with the size
  uint8_t dlpack;                    // DLDataTypeCode; the bits go with it
  int32_t xla;                       // PrimitiveType
  int32_t tensorflow;                // DataType
  std::string_view tensorflow_word;  // in an op's definition
};

struct DTypeRow {
  DType dtype;
  std::string_view name;  // numpy's name
  size_t bytes;
  DTypeKind kind;
  DTypeCodes codes;
};

inline constexpr std::array<DTypeRow, 13> kDTypes{{
    {DType::float16, "float16", 2, DTypeKind::half, {'e', 2, 10, 19, "half"}},
    {DType::bfloat16, "bfloat16", 2, DTypeKind::half, {'E', 4, 16, 14, "bfloat16"}},
    {DType::float32, "float32", 4, DTypeKind::floating, {'f', 2, 11, 1, "float"}},
    {DType::float64, "float64", 8, DTypeKind::floating, {'d', 2, 12, 2, "double"}},
    {DType::int8, "int8", 1, DTypeKind::integer, {'b', 0, 2, 6, "int8"}},
    {DType::int16, "int16", 2, DTypeKind::integer, {'h', 0, 3, 5, "int16"}},
    {DType::int32, "int32", 4, DTypeKind::integer, {'i', 0, 4, 3, "int32"}},
    {DType::int64, "int64", 8, DTypeKind::integer, {'q', 0, 5, 9, "int64"}},
    {DType::uint8, "uint8", 1, DTypeKind::integer, {'B', 1, 6, 4, "uint8"}},
    {DType::uint16, "uint16", 2, DTypeKind::integer, {'H', 1, 7, 17, "uint16"}},
    {DType::uint32, "uint32", 4, DTypeKind::integer, {'I', 1, 8, 22, "uint32"}},
    {DType::uint64, "uint64", 8, DTypeKind::integer, {'Q', 1, 9, 23, "uint64"}},
    {DType::boolean, "bool", 1, DTypeKind::boolean, {'?', 6, 1, 10, "bool"}},
}};

constexpr const DTypeRow& row(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }
constexpr size_t size_of(DType dtype) { return row(dtype).bytes; }
constexpr std::string_view name_of(DType dtype) { return row(dtype).name; }

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
