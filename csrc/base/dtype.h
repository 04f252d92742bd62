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

struct DTypeRow {
  DType dtype;
  std::string_view name;  // numpy's name
  size_t bytes;
  DTypeKind kind;
};

inline constexpr std::array<DTypeRow, 13> kDTypes{{
    {DType::float16, "float16", 2, DTypeKind::half},
    {DType::bfloat16, "bfloat16", 2, DTypeKind::half},
    {DType::float32, "float32", 4, DTypeKind::floating},
    {DType::float64, "float64", 8, DTypeKind::floating},
    {DType::int8, "int8", 1, DTypeKind::integer},
    {DType::int16, "int16", 2, DTypeKind::integer},
    {DType::int32, "int32", 4, DTypeKind::integer},
    {DType::int64, "int64", 8, DTypeKind::integer},
    {DType::uint8, "uint8", 1, DTypeKind::integer},
    {DType::uint16, "uint16", 2, DTypeKind::integer},
    {DType::uint32, "uint32", 4, DTypeKind::integer},
    {DType::uint64, "uint64", 8, DTypeKind::integer},
    {DType::boolean, "bool", 1, DTypeKind::boolean},
}};

constexpr const DTypeRow& row(DType dtype) { return kDTypes[static_cast<size_t>(dtype)]; }
constexpr size_t size_of(DType dtype) { return row(dtype).bytes; }
constexpr std::string_view name_of(DType dtype) { return row(dtype).name; }

constexpr std::optional<DType> dtype_named(std::string_view name) {
  for (const DTypeRow& r : kDTypes)
    if (r.name == name) return r.dtype;
  return std::nullopt;
}

}  // namespace farandole
