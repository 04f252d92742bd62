// The one list of reduce operations.
#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string_view>

#include "base/dtype.h"
#include "base/formula.h"

namespace farandole {

enum class ReduceOp : uint8_t { sum, mean, min, max, product };

struct ReduceOpRow {
  ReduceOp op;
  std::string_view name;
  Formula formula;
  bool on_booleans;
};

inline constexpr auto kReduceOps = std::to_array<ReduceOpRow>({
    {ReduceOp::sum, "sum", Formula::add, true},
    {ReduceOp::mean, "mean", Formula::add, false},
    {ReduceOp::min, "min", Formula::smaller, true},
    {ReduceOp::max, "max", Formula::larger, true},
    {ReduceOp::product, "product", Formula::multiply, true},
});

constexpr size_t index(ReduceOp op) { return static_cast<size_t>(op); }
constexpr const ReduceOpRow& row(ReduceOp op) { return kReduceOps[index(op)]; }
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
