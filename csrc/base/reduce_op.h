// The one list of reduce operations.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"

namespace farandole {

enum class ReduceOp : uint8_t { sum, mean, min, max, product };

struct ReduceOpRow {
  ReduceOp op;
  std::string_view name;
  bool on_booleans;  // sum is "or", product is "and", as in numpy
};

inline constexpr std::array<ReduceOpRow, 5> kReduceOps{{
    {ReduceOp::sum, "sum", true},
    {ReduceOp::mean, "mean", false},
    {ReduceOp::min, "min", true},
    {ReduceOp::max, "max", true},
    {ReduceOp::product, "product", true},
}};

constexpr const ReduceOpRow& row(ReduceOp op) { return kReduceOps[static_cast<size_t>(op)]; }
constexpr std::string_view name_of(ReduceOp op) { return row(op).name; }
constexpr bool has_meaning(ReduceOp op, DType dtype) {
  return row(dtype).kind != DTypeKind::boolean || row(op).on_booleans;
}

constexpr std::optional<ReduceOp> reduce_op_named(std::string_view name) {
  for (const ReduceOpRow& r : kReduceOps)
    if (r.name == name) return r.op;
  return std::nullopt;
}

}  // namespace farandole
