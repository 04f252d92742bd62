#include "devices/step_call.h"

#include <algorithm>
#include <atomic>
#include <bit>
#include <set>
#include <utility>

#include "base/hash.h"
#include "base/log.h"
#include "schedule/planners.h"

namespace farandole {
namespace {

std::optional<int> device_of(const PlacedArray& array) {
  return array.device ? std::optional(array.device->queue->device()) : std::nullopt;
}

/// The device of the arrays that this rank reads and writes. The input of a broadcast is the root's
/// alone. An array that is empty or missing may lie anywhere.
std::optional<int> device_of(const Options& o, const PlacedArray& input, const PlacedArray& output,
                             int rank) {
  const bool reads = input.buffer.count > 0 && (o.kind != Collective::broadcast || rank == o.root);
  const bool writes = output.buffer.count > 0;
  const auto from = device_of(input), to = device_of(output);
  if ((reads && !from) || (writes && !to) || (reads && writes && from != to)) return std::nullopt;
  if (reads) return from;
  return writes || !from ? to : from;
}

/// The device of all arrays, if it is one.
std::optional<int> device_of(const Options& o, const std::vector<PlacedOperand>& arrays, int rank) {
  if (arrays.empty()) return std::nullopt;
  const auto first = device_of(o, arrays[0].input, arrays[0].output, rank);
  const bool alike = std::ranges::all_of(arrays, [&](const auto& array) {
    return device_of(o, array.input, array.output, rank) == first;
  });
  return alike ? first : std::nullopt;
}

/// The streams in which a call's arrays on this device are made: their owners', or those that their
/// owners let wait for them.
std::set<uint64_t> streams_of(const std::vector<PlacedOperand>& arrays, int device) {
  std::set<uint64_t> streams;
  for (const PlacedOperand& array : arrays)
    for (const auto* span : {&array.input.device, &array.output.device})
      if (*span && (*span)->queue->device() == device)
        streams.insert((*span)->stream.value_or((*span)->queue->stream()));
  return streams;
}

/// Several arrays as one operand: it has no memory, but its buffers do not overlap.
Operand together(const Pack& pack, Options& options) {
  Operand whole = pack.operand();
  if (options.kind == Collective::reduce_scatter || options.kind == Collective::all_gather)
    whole.output.data = std::bit_cast<std::byte*>(whole.input.bytes());
  options.counts = pack.counts();
  return whole;
}

Pack pack_of(Collective kind, int size, const std::vector<PlacedOperand>& arrays) {
  std::vector<Operand> buffers;
  for (const PlacedOperand& array : arrays) buffers.push_back(array.buffers());
  return {kind, size, std::move(buffers)};
}

/// The call's algorithm, or the group's default.
const std::string& algorithm_of(const Group& group, const Options& o) {
  return o.algorithm.empty() ? group.defaults().algorithm : o.algorithm;
}

/// Whether no path was asked for, or only a planner, whose schedule devices may run, too.
bool may_choose(const Group& group, const Options& o) {
  const std::string& algorithm = algorithm_of(group, o);
  return group.engine()->options().device_path != "staged" && !o.epilogue &&
         (algorithm.empty() || find_planner(o.kind, algorithm) != nullptr);
}

void name_graph(Options& options) {
  if (!options.algorithm.empty())
    throw Error(ErrorCode::invalid_argument,
                "a collective that becomes part of a CUDA graph has a way of its own, and none by "
                "algorithm='" +
                    options.algorithm + "'");
  if (options.epilogue)
    throw Error(ErrorCode::invalid_argument,
                "an update that is sharded cannot become part of a CUDA graph");
  options.algorithm = kGraphWay;
}

/// For this call or for all of them.
DeviceAsked asked_of(const Group& group, const Options& o) {
  return device_asked(algorithm_of(group, o), group.engine()->options().device_path);
}

/// Whether the ranks' devices may run it, as far as all of them know beforehand: those that share
/// no buckets have NCCL alone. Where that was asked for by name the operation says why it cannot.
bool devices_may_run(const Group& group, const Options& o, DType dtype, Determinism level,
                     const Shape& shape) {
  const std::string no_buckets = Steps::why_no_buckets(group);
  if (no_buckets.empty()) return true;
  if (device_way_named(o.algorithm)) return o.algorithm == name_of(DeviceWay::nccl);
  DeviceQuestion question = question_of(o, dtype, level, shape, asked_of(group, o));
  question.no_buckets = no_buckets;
  question.staged_piece = group.engine()->options().staged_piece_bytes;
  if (choose_device_way(question) != DeviceWay::staged) return true;
  question.level = Determinism::fast;
  if (level == Determinism::canonical && choose_device_way(question) != DeviceWay::staged)
    warn_of_level(group, no_buckets);
  return false;
}

/// A hash of what ranks agree on, as far as it decides whether all have their arrays on devices,
/// and use those.
uint64_t hash_of_call(const Options& o, Determinism level, DType dtype, size_t count) {
  Hash hash;
  hash.add(static_cast<uint64_t>(o.op) | static_cast<uint64_t>(level) << 32);
  hash.add(o.prescale);
  hash.add(o.postscale);
  hash.add(static_cast<uint64_t>(o.kind) | static_cast<uint64_t>(o.root) << 32);
  hash.add(static_cast<uint64_t>(dtype) << 56 | count);
  hash.add(std::span(o.counts));
  hash.add(o.algorithm);
  hash.add(o.name);
  return hash.value();
}

}  // namespace

void warn_of_level(const Group& group, std::string_view no_buckets) {
  static std::atomic<bool> warned{false};
  const bool is_plain = group.engine()->options().wire == Wire::plain;  // NCCL seals nothing
  if (group.rank() != 0 || !is_plain || warned.exchange(true)) return;
  log(LogLevel::warning,
      "level 'canonical' reduces arrays of devices in the hosts' memory here, since the group's "
      "devices share none (" +
          std::string(no_buckets) +
          ") and NCCL folds in an order of its own. Large arrays may take ten times as long as by "
          "NCCL, or more. FARANDOLE_LEVEL=fast lets NCCL reduce them");
}

void check_level_of_way(const Group& group, const Options& o) {
  const DeviceAsked asked = asked_of(group, o);
  const auto way = device_way_named(asked.way);
  if (!way || !asked.planner.empty()) return;
  const std::string why = why_not_of_level(*way, o.kind, o.level.value_or(group.defaults().level));
  if (!why.empty())
    throw Error(
        ErrorCode::invalid_argument,
        std::string(name_of(o.kind)) + " cannot go by '" + std::string(name_of(*way)) + "': " + why,
        {}, "choose level='fast' (FARANDOLE_LEVEL=fast), or another way for it");
}

std::shared_ptr<StepCall> StepCall::offer(Group& group, Options& options,
                                          const std::vector<PlacedOperand>& arrays,
                                          std::shared_ptr<StagedCopies> copies,
                                          const std::shared_ptr<Stream>& stream) {
  const auto graph = graph_of(arrays);
  if (graph) {
    group.engine()->driver().require_progress("a collective in a CUDA graph");
    name_graph(options);
  }
  const auto asked = device_way_named(options.algorithm);
  if (asked == DeviceWay::staged) options.algorithm.clear();
  if (asked ? asked == DeviceWay::staged : !graph && !may_choose(group, options)) return nullptr;
  if (arrays.empty()) return nullptr;
  const auto device = device_of(options, arrays, group.rank());
  const Operand whole = arrays.size() == 1
                            ? arrays[0].buffers()
                            : together(pack_of(options.kind, group.size(), arrays), options);
  const Shape shape = checked_shape(whole.input, whole.output, options, group.rank(), group.size());
  const Determinism level = options.level.value_or(group.defaults().level);
  const DeviceAsked named = asked_of(group, options);
  if (!graph && !named.planner.empty() &&
      !lanes_planner(question_of(options, whole.output.dtype, level, shape, named)))
    return nullptr;  // the host says what is wrong with it
  const bool runs = has_steps(options.kind);
  if (runs && amount_of(options.kind, shape) == 0) {  // on no rank there is anything to do
    if (asked || graph) options.algorithm.clear();
    return nullptr;
  }
  if (runs) check_level_of_way(group, options);
  const bool may_run = runs && devices_may_run(group, options, whole.output.dtype, level, shape);
  std::shared_ptr<Steps> steps;
  if (device && may_run)
    steps = stream ? Steps::of(group, stream, *device) : Steps::of(group, *device);
  if ((asked || graph) && !steps) {
    const std::string no_buckets = may_run ? "" : Steps::why_no_buckets(group);
    throw Error(
        ErrorCode::invalid_argument,
        std::string(name_of(options.kind)) +
            (graph ? " cannot become part of a CUDA graph"
                   : " cannot go by '" + options.algorithm + "'") +
            " here: " +
            (no_buckets.empty() ? "that takes input and output on one device, the group's own"
                                : no_buckets));
  }
  const uint64_t call = hash_of_call(options, level, whole.output.dtype, shape.count);
  if (!steps || !steps->worth_trying(call)) return nullptr;
  std::shared_ptr<StepCall> made(
      new StepCall(steps, group, options, arrays, whole, std::move(copies), call, graph));
  if (graph) made->graphs_ = &steps->graphs(group);
  return made;
}

StepCall::StepCall(std::shared_ptr<Steps> steps, const Group& group, const Options& options,
                   const std::vector<PlacedOperand>& arrays, const Operand& operand,
                   std::shared_ptr<StagedCopies> copies, uint64_t call,
                   std::optional<uint64_t> graph)
    : steps_(std::move(steps)),
      named_(graph || device_way_named(options.algorithm)),
      arena_(group.engine()->arena()),
      rank_(group.rank()),
      world_rank_(group.engine()->host().rank),
      size_(group.size()),
      spec_(options),
      placed_(arrays),
      operand_(operand),
      copies_(std::move(copies)),
      call_(call),
      piece_(staged_piece_of(group, options, arrays)) {
  arrays_.in_place = std::ranges::all_of(placed_, [](const PlacedOperand& array) {
    return array.input.buffer.data == array.output.buffer.data;
  });
  arrays_.kept = copies_;  // which keeps the arrays
  const auto& [input, output] = placed_.front();
  if (placed_.size() > 1) {
    lay_together();
  } else {
    arrays_.input = input.device ? input.device->address : 0;
    arrays_.output = output.device ? output.device->address : 0;
  }
  arrays_.graph = graph;
  if (graph) return;  // what is in its stream orders it
  arrays_.moments = steps_->moments(streams_of(placed_, steps_->device()));
}

void StepCall::lay_together() {
  const Pack pack = pack_of(spec_.kind, size_, placed_);
  const auto lay = [](Stretches& all, const std::vector<Buffer>& parts) {
    for (const Buffer& part : parts) all.add(reinterpret_cast<uint64_t>(part.data), part.bytes());
  };
  lay(arrays_.inputs, pack.inputs());
  lay(arrays_.outputs, pack.outputs());
  for (const PlacedOperand& array : placed_) arrays_.together.push_back(array.buffers());
}

Backend& StepCall::backend() {
  if (graphs_ != nullptr) {
    graphs_->take(arrays_);
    return *graphs_;
  }
  steps_->backend().take(arrays_);
  return steps_->backend();
}

std::shared_ptr<PiecesOnDevices> StepCall::go_by_host(Operation& operation, size_t piece) {
  steps_->note_failed(call_);
  try {
    if (piece > 0) {
      const Cut cut(spec_.kind, shape_of(operation, rank_, size_), piece);
      return StagedPieces::of(copies_, spec_, placed_.front(), cut, rank_);
    }
    BufferPool pool(arena_);
    const StagedArrays lie = stage_all(*copies_, Options(spec_), placed_, rank_, size_, pool);
    pack_ = lie.pack;
    operation.gate = copies_;
    if (pack_) run_on(pack_, operation);
    operation.input = lie.whole.input;
    operation.output = lie.whole.output;
    return nullptr;
  } catch (const Error& error) {
    throw on_rank(error, world_rank_);
  }
}

void StepCall::unpack() {
  if (pack_) pack_->unpack_all();
}

void StepCall::hand_over(std::optional<uint64_t> stream) {
  if (is_captured()) return;  // whatever follows in the graph comes after it
  steps_->hand_over(arrays_, stream);
}

}  // namespace farandole
