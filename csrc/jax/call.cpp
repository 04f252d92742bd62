#include "jax/call.h"

#include <algorithm>
#include <array>
#include <optional>
#include <string_view>

namespace farandole {
namespace {

Error invalid(const std::string& text) { return Error(ErrorCode::invalid_argument, text); }

// XLA's number of each element type that we have.
struct ElementRow {
  ffi::ElementType number;
  DType dtype;
};
constexpr std::array<ElementRow, 13> kElements{{
    {1, DType::boolean},
    {2, DType::int8},
    {3, DType::int16},
    {4, DType::int32},
    {5, DType::int64},
    {6, DType::uint8},
    {7, DType::uint16},
    {8, DType::uint32},
    {9, DType::uint64},
    {10, DType::float16},
    {11, DType::float32},
    {12, DType::float64},
    {16, DType::bfloat16},
}};

std::optional<DType> dtype_of(ffi::ElementType number) {
  for (const ElementRow& row : kElements)
    if (row.number == number) return row.dtype;
  return std::nullopt;
}

// ---- attributes ----

const void* attribute(const ffi::Attributes& all, std::string_view name, ffi::AttributeType type) {
  for (int64_t i = 0; i < all.size; ++i) {
    const ffi::Text& have = *all.names[i];
    if (std::string_view(have.data, have.size) != name) continue;
    if (all.types[i] == type) return all.values[i];
    break;
  }
  throw invalid("the call lacks attribute '" + std::string(name) + "', or it is of another type");
}

std::string_view text(const ffi::Attributes& all, std::string_view name) {
  const auto* value =
      static_cast<const ffi::Text*>(attribute(all, name, ffi::AttributeType::string));
  return {value->data, value->size};
}

template <typename T>
T number(const ffi::Attributes& all, std::string_view name, DType dtype) {
  const auto* value =
      static_cast<const ffi::Scalar*>(attribute(all, name, ffi::AttributeType::scalar));
  if (dtype_of(value->dtype) != dtype)
    throw invalid("attribute '" + std::string(name) + "' is no " + std::string(name_of(dtype)));
  return *static_cast<const T*>(value->value);
}

int whole(const ffi::Attributes& all, std::string_view name) {
  return static_cast<int>(number<int64_t>(all, name, DType::int64));
}

double factor(const ffi::Attributes& all, std::string_view name) {
  return number<double>(all, name, DType::float64);
}

Collective kind_of(const ffi::Attributes& all) {
  const std::string_view name = text(all, "kind");
  if (const auto kind = collective_named(name)) return *kind;
  throw invalid("there is no collective '" + std::string(name) + "'");
}

ReduceOp op_of(const ffi::Attributes& all) {
  const std::string_view name = text(all, "op");
  if (const auto op = reduce_op_named(name)) return *op;
  throw invalid("there is no operation '" + std::string(name) + "'");
}

// ---- operands ----

Buffer buffer_of(const ffi::Values& values, int64_t i) {
  if (values.types[i] != ffi::ValueType::buffer) throw invalid("an operand is no array");
  const auto& given = *static_cast<const ffi::Buffer*>(values.values[i]);
  const std::optional<DType> dtype = dtype_of(given.dtype);
  if (!dtype)
    throw invalid("array " + std::to_string(i) + " is of XLA's element type " +
                  std::to_string(given.dtype) + ", which is not supported");
  size_t count = 1;
  for (int64_t d = 0; d < given.rank; ++d) count *= static_cast<size_t>(given.dims[d]);
  return {static_cast<std::byte*>(given.data), count, *dtype};
}

uint32_t& token_in(const ffi::Values& values) {
  const Buffer token = buffer_of(values, values.size - 1);
  if (token.dtype != DType::uint32 || token.count != 1)
    throw invalid("the last operand of the call is no token");
  return *reinterpret_cast<uint32_t*>(token.data);
}

}  // namespace

JaxCall read_call(const ffi::CallFrame& frame) {
  if (frame.arguments.size < 1 || frame.arguments.size != frame.results.size)
    throw invalid("the call has " + std::to_string(frame.arguments.size) + " operands and " +
                  std::to_string(frame.results.size) + " results");
  JaxCall call;
  const ffi::Attributes& attributes = frame.attributes;
  call.kind = kind_of(attributes);
  call.options.op = op_of(attributes);
  call.options.prescale = factor(attributes, "prescale");
  call.options.postscale = factor(attributes, "postscale");
  call.options.root = whole(attributes, "root");
  call.options.name = text(attributes, "label");
  call.ranks = text(attributes, "ranks");
  call.size = whole(attributes, "size");
  for (int64_t i = 0; i + 1 < frame.arguments.size; ++i)
    call.members.push_back({buffer_of(frame.arguments, i), buffer_of(frame.results, i)});
  call.position = token_in(frame.arguments);
  token_in(frame.results) = call.position + 1;
  return call;
}

}  // namespace farandole
