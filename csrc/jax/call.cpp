#include "jax/call.h"

#include <string_view>

#include "jax/frame.h"

namespace farandole {
namespace {

Collective kind_of(const ffi::Attributes& all) {
  const std::string_view name = text_of(all, "kind");
  if (const auto kind = collective_named(name)) return *kind;
  throw invalid_call("there is no collective '" + std::string(name) + "'");
}

ReduceOp op_of(const ffi::Attributes& all) {
  const std::string_view name = text_of(all, "op");
  if (const auto op = reduce_op_named(name)) return *op;
  throw invalid_call("there is no operation '" + std::string(name) + "'");
}

uint32_t& token_in(const ffi::Values& values) {
  const Buffer token = buffer_of(values, values.size - 1);
  if (token.dtype != DType::uint32 || token.count != 1)
    throw invalid_call("the last operand of the call is no token");
  return *reinterpret_cast<uint32_t*>(token.data);
}

}  // namespace

JaxCall read_call(const ffi::CallFrame& frame) {
  if (frame.arguments.size < 1 || frame.arguments.size != frame.results.size)
    throw invalid_call("the call has " + std::to_string(frame.arguments.size) + " operands and " +
                       std::to_string(frame.results.size) + " results");
  JaxCall call;
  const ffi::Attributes& attributes = frame.attributes;
  call.options.kind = kind_of(attributes);
  call.options.op = op_of(attributes);
  call.options.prescale = factor_of(attributes, "prescale");
  call.options.postscale = factor_of(attributes, "postscale");
  call.options.root = static_cast<int>(whole_of(attributes, "root"));
  call.options.name = text_of(attributes, "label");
  call.ranks = text_of(attributes, "ranks");
  call.size = static_cast<int>(whole_of(attributes, "size"));
  for (int64_t i = 0; i + 1 < frame.arguments.size; ++i)
    call.operands.push_back({buffer_of(frame.arguments, i), buffer_of(frame.results, i)});
  call.position = token_in(frame.arguments);
  token_in(frame.results) = call.position + 1;
  return call;
}

}  // namespace farandole
