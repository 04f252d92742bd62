#include "devices/staged_arrays.h"

#include <set>

namespace farandole {
namespace {

/// Whether this rank's input is read at all.
bool reads_input(const CollectiveSpec& o, const PlacedArray& input, int rank) {
  return input.buffer.count > 0 && (o.kind != Collective::broadcast || rank == o.root);
}

/// Whether this rank's output changes: the root of a broadcast in place has it already.
bool writes_output(const CollectiveSpec& o, const PlacedArray& input, const PlacedArray& output,
                   int rank) {
  const bool has_it =
      o.kind == Collective::broadcast && rank == o.root && input.buffer.data == output.buffer.data;
  return output.buffer.count > 0 && !has_it;
}

/// An all_reduce may overwrite its copy of the input; others might, and need not.
bool may_share(const CollectiveSpec& o, const PlacedArray& input, const PlacedArray& output) {
  return o.kind == Collective::all_reduce && input.device && output.device &&
         input.device->queue == output.device->queue;
}

}  // namespace

StagedEnds::StagedEnds(const CollectiveSpec& spec, const PlacedArray& input,
                       const PlacedArray& output, int rank)
    : brings(input.device && reads_input(spec, input, rank)),
      takes_back(output.device && writes_output(spec, input, output, rank)),
      shares(brings && takes_back && may_share(spec, input, output)) {}

Operand StagedEnds::lie(const PlacedArray& input, const PlacedArray& output, std::byte* brought,
                        std::byte* taken_back) const {
  Buffer from = input.buffer, to = output.buffer;
  if (brings) from.data = brought;
  if (takes_back) to.data = taken_back;
  // An input that is not copied is never read, so the other buffer's memory stands in for it.
  if (input.device && !brings) from.data = to.data;
  if (output.device && !takes_back) to.data = from.data;
  return {from, to};
}

Operand stage(StagedCopies& copies, const Options& options, const PlacedArray& input,
              const PlacedArray& output, int rank) {
  const StagedEnds ends(options, input, output, rank);
  std::byte* const brought = ends.brings ? copies.bring(*input.device) : nullptr;
  std::byte* const back = ends.takes_back ? copies.expect(*output.device, ends.shares) : nullptr;
  return ends.lie(input, output, brought, back);
}

StagedArrays stage_all(StagedCopies& copies, const Options& options,
                       const std::vector<PlacedOperand>& arrays, int rank, int size,
                       BufferPool& pool) {
  std::vector<Operand> lie;
  for (const auto& [input, output] : arrays)
    lie.push_back(stage(copies, options, input, output, rank));
  copies.seal();
  if (lie.empty()) return {};
  if (lie.size() == 1) return {lie.front(), nullptr};
  auto pack = std::make_shared<Pack>(options.kind, size, std::move(lie));
  pack->reserve(pool);
  return {pack->operand(), pack};
}

std::shared_ptr<StagedCopies> copies_for(Group& group, Options& options) {
  const auto copies =
      std::make_shared<StagedCopies>(Staging::of(*group.engine()), group.membership().detector,
                                     group.engine()->host().rank, std::move(options.keepalive));
  options.gate = copies;
  return copies;
}

void refuse_graph(const PlacedArray& array, std::string_view what) {
  if (array.device && array.device->graph)
    throw Error(ErrorCode::invalid_argument,
                "the stream of an array is being captured into a CUDA graph, and " +
                    std::string(what) + " cannot become part of one",
                {}, "capture collectives in program order alone (docs/cuda.md)");
}

std::optional<uint64_t> graph_of(const std::vector<PlacedOperand>& arrays) {
  std::set<std::optional<uint64_t>> all, of_empty;
  for (const PlacedOperand& operand : arrays)
    for (const PlacedArray* array : {&operand.input, &operand.output})
      (array->buffer.count > 0 ? all : of_empty)
          .insert(array->device ? array->device->graph : std::nullopt);
  if (all.size() > 1)
    throw Error(ErrorCode::invalid_argument,
                "the stream of an array of this call is being captured into a CUDA graph, and that "
                "of another one is another, or is not",
                {}, "let all of them have the stream that is captured");
  if (!all.empty()) return *all.begin();
  return of_empty.empty() ? std::nullopt : *of_empty.rbegin();  // one that is captured is the last
}

}  // namespace farandole
