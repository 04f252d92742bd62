#include "named/request.h"

#include <unistd.h>

#include <algorithm>
#include <cstdlib>
#include <new>

#include "fold/neutral.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

size_t product(std::span<const int64_t> shape) {
  size_t count = 1;
  for (const int64_t n : shape) count *= static_cast<size_t>(n);
  return count;
}

/// Elements of one row: everything but the first dimension.
size_t row_of(std::span<const int64_t> shape) {
  return shape.empty() ? 1 : product(shape.subspan(1));
}

/// Rows of member m's part of `rows`: the first ones get one more.
size_t share(size_t rows, int members, int m) {
  return part({Space::input, 0, rows}, members, m).count;
}

std::string title_of(const NamedCall& call) {
  const std::string kind(name_of(call.kind));
  return call.name.empty() ? kind : kind + " '" + std::string(call.name) + "'";
}

void check_splits(const NamedCall& call, const NamedSet& set) {
  const int64_t rows = call.tensors[0].shape[0];
  if (call.splits.size() != static_cast<size_t>(set.size()))
    throw invalid_argument(title_of(call) + " has " + std::to_string(call.splits.size()) +
                           " splits for " + std::to_string(set.size()) + " ranks");
  int64_t sum = 0;
  for (const int64_t n : call.splits) {
    if (n < 0)
      throw invalid_argument(title_of(call) + " has a negative split, " + std::to_string(n));
    sum += n;
  }
  if (sum != rows)
    throw invalid_argument("the splits of " + title_of(call) + " sum to " + std::to_string(sum) +
                           "; the tensor has " + std::to_string(rows) + " rows");
}

void check_tensor(const NamedCall& call, const NamedTensor& tensor) {
  const DType dtype = tensor.input.dtype;
  if (folds(call.kind)) {
    if (!has_meaning(call.op, dtype))
      throw invalid_argument(std::string(name_of(call.op)) + " has no meaning on " +
                             std::string(name_of(dtype)) + " (" + title_of(call) + ")");
    if (dtype == DType::boolean && (call.prescale != 1 || call.postscale != 1))
      throw invalid_argument("booleans cannot be scaled (" + title_of(call) + ")");
  }
  const bool by_rows = call.kind == Collective::all_gather || call.kind == Collective::all_to_all ||
                       call.kind == Collective::reduce_scatter;
  if (by_rows && tensor.shape.empty())
    throw invalid_argument("a tensor of " + title_of(call) +
                           " has 0 dimensions; it works along the first");
}

/// Elements of each member's contribution to part `p` of an all_gather.
std::vector<size_t> gathered_counts(const Signature& t, size_t p, const NamedSet& set,
                                    std::span<const int64_t> extents) {
  const size_t each = t.tensors.size(), row = row_of(t.tensors[p].shape);
  std::vector<size_t> counts;
  for (size_t m = 0; m < set.members.size(); ++m)
    counts.push_back(static_cast<size_t>(extents[m * each + p]) * row);
  return counts;
}

/// Elements that each member sends to each, by sender.
std::vector<size_t> exchanged_counts(const Signature& t, std::span<const int64_t> extents) {
  const size_t row = row_of(t.tensors[0].shape);
  std::vector<size_t> counts;
  for (const int64_t rows : extents) counts.push_back(static_cast<size_t>(rows) * row);
  return counts;
}

std::vector<size_t> scattered_counts(const Signature& t, size_t p, const NamedSet& set) {
  const std::vector<int64_t>& shape = t.tensors[p].shape;
  std::vector<size_t> counts;
  for (int m = 0; m < set.size(); ++m)
    counts.push_back(share(static_cast<size_t>(shape[0]), set.size(), m) * row_of(shape));
  return counts;
}

bool all_equal(const std::vector<size_t>& counts) {
  return std::ranges::all_of(counts, [&](size_t n) { return n == counts.front(); });
}

Error no_memory(const NamedRequest& request, const NamedSet& set, size_t bytes) {
  const Signature& t = request.described();
  Context where;
  where.rank = set.members[static_cast<size_t>(set.rank)];
  where.pid = ::getpid();
  where.operation = name_of(t.kind);
  where.tensor = t.name;
  where.bytes_total = bytes;
  return {ErrorCode::resource,
          "rank " + std::to_string(where.rank) + " cannot allocate " + std::to_string(bytes) +
              " bytes for " + t.title(),
          std::move(where), "give that rank more memory, or send less at once"};
}

/// The result of part `p`, in rows of the input's shape.
void make_result(NamedRequest& request, size_t p, const NamedSet& set, size_t rows) {
  const TensorSignature& like = request.described().tensors[p];
  std::vector<int64_t> shape = like.shape;
  shape[0] = static_cast<int64_t>(rows);
  const size_t count = rows * row_of(like.shape), bytes = count * size_of(like.dtype);
  Buffer& output = request.parts[p].output;
  if (request.listener != nullptr) {
    std::byte* const room = request.listener->make_room(p, shape);
    if (room == nullptr && count > 0) throw no_memory(request, set, bytes);
    output = {room, count, like.dtype};
    return;
  }
  MadeResult& made = request.parts[p].made;
  made.shape = std::move(shape);
  try {
    made.data = allocate_result(bytes);
  } catch (const std::bad_alloc&) {
    throw no_memory(request, set, bytes);
  }
  made.buffer = output = {made.data.get(), count, like.dtype};
}

/// Memory of a rank that takes part for others only: it adds nothing, and drops what it gets.
void make_proxy(NamedRequest& request, const NamedSet& set) {
  const Signature& t = request.described();
  const Collective kind = t.kind;
  const auto give = [&](size_t count, DType dtype, bool neutral) {
    const size_t bytes = count * size_of(dtype);
    auto& memory = request.memory.emplace_back(new (std::nothrow) std::byte[bytes + 1]);
    if (!memory) throw no_memory(request, set, bytes);
    if (neutral) fill_neutral(memory.get(), count, dtype, t.op);
    return Buffer{memory.get(), count, dtype};
  };
  for (size_t p = 0; p < t.tensors.size(); ++p) {
    const TensorSignature& tensor = t.tensors[p];
    NamedRequest::Part& part = request.parts.emplace_back();
    const size_t whole = product(tensor.shape);
    part.input = part.output = {nullptr, 0, tensor.dtype};
    if (kind == Collective::all_reduce || kind == Collective::broadcast) {
      part.input = part.output = give(whole, tensor.dtype, kind == Collective::all_reduce);
    } else if (kind == Collective::reduce_scatter) {
      part.input = give(whole, tensor.dtype, true);
      part.output =
          give(scattered_counts(t, p, set)[static_cast<size_t>(set.rank)], tensor.dtype, false);
    }
  }
}

}  // namespace

std::shared_ptr<std::byte> allocate_result(size_t bytes) {
  constexpr size_t kLine = 64;
  const size_t room = (std::max<size_t>(bytes, 1) + kLine - 1) / kLine * kLine;
  auto* data = static_cast<std::byte*>(std::aligned_alloc(kLine, room));
  if (data == nullptr) throw std::bad_alloc();
  return {data, [](std::byte* p) { std::free(p); }};
}

void check(const NamedCall& call, const NamedSet& set) {
  if (call.name.size() > kLongestName)
    throw invalid_argument("a name of " + std::to_string(call.name.size()) + " bytes; at most " +
                           std::to_string(kLongestName) + " are");
  if (call.note.size() > kLongestNote)
    throw invalid_argument("a note of " + std::to_string(call.note.size()) + " bytes; at most " +
                           std::to_string(kLongestNote) + " are");
  if (call.tensors.size() > kMostTensors)
    throw invalid_argument(title_of(call) + " has " + std::to_string(call.tensors.size()) +
                           " tensors; at most " + std::to_string(kMostTensors) + " go together");
  if (std::ranges::find(set.members, call.root) == set.members.end() &&
      call.kind == Collective::broadcast)
    throw invalid_argument("root " + std::to_string(call.root) + " of " + title_of(call) +
                           " is not a rank of its process set of ranks " +
                           describe_ranks(set.members));
  if (call.tensors.empty() && call.kind != Collective::barrier)
    throw invalid_argument(title_of(call) + " has no tensors");
  for (const NamedTensor& tensor : call.tensors) check_tensor(call, tensor);
  if (call.kind == Collective::all_to_all) check_splits(call, set);
}

bool matches(const Signature& t, const NamedCall& call) {
  if (static_cast<const CollectiveSpec&>(t) != call || !t.lasting ||
      t.tensors.size() != call.tensors.size() || t.note != call.note ||
      !std::ranges::equal(t.splits, call.splits))
    return false;
  for (size_t i = 0; i < call.tensors.size(); ++i)
    if (t.tensors[i].dtype != call.tensors[i].input.dtype ||
        !std::ranges::equal(t.tensors[i].shape, call.tensors[i].shape))
      return false;
  return true;
}

Signature signature_of(const NamedCall& call, std::string_view name) {
  Signature t;
  static_cast<CollectiveSpec&>(t) = call;
  t.name = name;
  t.set = call.set;
  t.lasting = !call.name.empty();
  for (const NamedTensor& tensor : call.tensors)
    t.tensors.push_back({tensor.input.dtype, {tensor.shape.begin(), tensor.shape.end()}});
  t.splits.assign(call.splits.begin(), call.splits.end());
  t.note = call.note;
  return t;
}

void complete_parts(NamedRequest& request, const NamedSet& set, std::span<const int64_t> extents) {
  const Signature& t = request.described();
  const Collective kind = t.kind;
  if (request.signature) make_proxy(request, set);
  if (kind == Collective::all_gather) {
    for (size_t p = 0; p < t.tensors.size(); ++p) {
      size_t rows = 0;
      for (size_t m = 0; m < set.members.size(); ++m)
        rows += static_cast<size_t>(extents[m * t.tensors.size() + p]);
      make_result(request, p, set, rows);
    }
  } else if (kind == Collective::all_to_all) {
    const size_t n = set.members.size(), me = static_cast<size_t>(set.rank);
    size_t rows = 0;
    request.received.clear();
    for (size_t from = 0; from < n; ++from) {
      request.received.push_back(extents[from * n + me]);
      rows += static_cast<size_t>(extents[from * n + me]);
    }
    make_result(request, 0, set, rows);
  }
}

Operation operation_of(const NamedRequest& request, size_t p, const NamedSet& set,
                       std::span<const int64_t> extents) {
  const Signature& t = request.described();
  Operation o;
  static_cast<CollectiveSpec&>(o) = t;
  o.root = 0;
  o.name = t.name;
  o.algorithm = set.algorithm;
  o.level = set.level;
  o.timeout = set.timeout;
  o.gate = request.gate;
  if (o.kind == Collective::barrier) return o;
  if (o.kind == Collective::broadcast)
    o.root = static_cast<int>(std::ranges::find(set.members, t.root) - set.members.begin());
  o.input = request.parts[p].input;
  o.output = request.parts[p].output;
  o.on_devices = request.parts[p].on_devices;
  o.count = o.input.count;
  if (o.kind == Collective::all_gather)
    o.counts = gathered_counts(t, p, set, extents);
  else if (o.kind == Collective::all_to_all)
    o.counts = exchanged_counts(t, extents);
  else if (o.kind == Collective::reduce_scatter)
    o.counts = scattered_counts(t, p, set);
  if (o.counts.empty()) return o;
  if (all_equal(o.counts)) {  // the even form
    if (o.kind == Collective::all_to_all) o.count = o.counts.front();
    o.counts.clear();
  } else {
    o.count = 0;
  }
  return o;
}

}  // namespace farandole
