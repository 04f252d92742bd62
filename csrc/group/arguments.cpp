#include "group/arguments.h"

#include "schedule/planners.h"
#include "schedule/routes.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

void check_overlap(Collective kind, const Buffer& input, const Buffer& output,
                   std::optional<size_t> allowed) {
  const auto in = reinterpret_cast<uintptr_t>(input.data);
  const auto out = reinterpret_cast<uintptr_t>(output.data);
  const bool apart = in + input.bytes() <= out || out + output.bytes() <= in;
  if (apart || input.count == 0 || output.count == 0) return;
  const size_t offset = allowed.value_or(0) * size_of(input.dtype);
  if (!allowed)
    throw invalid_argument(std::string(name_of(kind)) +
                           " cannot be in place: input and output overlap");
  if (in + offset == out || in == out + offset) return;
  throw invalid_argument("input and output overlap, but are not in place");
}

/// The shape's count, as far as this rank's buffers tell it.
size_t count_of(Collective kind, const Buffer& input, const Buffer& output, int size) {
  const auto p = static_cast<size_t>(size);
  if (kind == Collective::scatter) return output.count;
  if (kind != Collective::all_to_all) return input.count;
  if (input.count % p != 0)
    throw invalid_argument("all_to_all of " + std::to_string(input.count) + " elements on " +
                           std::to_string(p) + " ranks: the blocks would not be equal");
  return input.count / p;
}

/// Where the output begins in the input's memory, or the other way round, in place. Blocks of an
/// all_to_all would be overwritten before others have read them.
std::optional<size_t> in_place_offset(Collective kind, const Shape& shape) {
  switch (kind) {
    case Collective::reduce_scatter:
    case Collective::scatter:
    case Collective::all_gather:
    case Collective::gather:
      return share_of(kind, shape, shape.rank).offset;
    case Collective::all_to_all:
      return std::nullopt;
    default:
      return 0;
  }
}

void check_buffers(Collective kind, const Buffer& input, const Buffer& output, const Shape& shape) {
  if (input.dtype != output.dtype)
    throw invalid_argument("input is " + std::string(name_of(input.dtype)) + ", output is " +
                           std::string(name_of(output.dtype)));
  require_valid(kind, shape);
  const Sizes sizes = sizes_of(kind, shape);
  const auto require = [&](const char* what, const Buffer& buffer, size_t expected) {
    if (buffer.count == expected) return;
    throw invalid_argument(std::string(what) + " has " + std::to_string(buffer.count) +
                           " elements; " + std::string(name_of(kind)) + " of " +
                           std::to_string(input.count) + " elements on " +
                           std::to_string(shape.size) + " ranks needs " + std::to_string(expected));
  };
  require("input", input, sizes.input);
  require("output", output, sizes.output);
  check_overlap(kind, input, output, in_place_offset(kind, shape));
}

void check_fold(const Options& o, DType dtype) {
  if (!has_meaning(o.op, dtype))
    throw invalid_argument(std::string(name_of(o.op)) + " has no meaning on " +
                           std::string(name_of(dtype)));
  if (dtype == DType::boolean && (o.prescale != 1 || o.postscale != 1))
    throw invalid_argument("booleans cannot be scaled");
}

}  // namespace

Shape checked_shape(const Buffer& input, const Buffer& output, const Options& o, int rank,
                    int size) {
  if (o.root < 0 || o.root >= size)
    throw invalid_argument("root " + std::to_string(o.root) + " is not a rank of this group of " +
                           std::to_string(size));
  Shape shape;
  shape.rank = rank;
  shape.size = size;
  shape.root = o.root;
  shape.count = o.counts.empty() ? count_of(o.kind, input, output, size) : 0;
  shape.counts = o.counts;
  if (o.kind != Collective::barrier) check_buffers(o.kind, input, output, shape);
  if (folds(o.kind)) check_fold(o, input.dtype);
  return shape;
}

}  // namespace farandole
