#include "devices/piece_call.h"

#include <utility>

#include "stream/backend.h"

namespace farandole {
namespace {

/// Runs nothing: ranks agree on the operation as a whole before its pieces. It has no state: one
/// serves all calls, whose stream may ask it when they are gone.
class ByHost : public Backend {
 public:
  std::string_view name() const override { return "devices"; }
  bool can_run(const Operation&) const override { return true; }
  void refuse(const Operation&) const override {}
  std::string ways_for(const Operation&) const override { return "staged"; }
  void start(const Operation&, uint32_t) override {}
  Progress poll(TimePoint) override { return Progress::finished; }
  std::string declined() const override { return "it goes by the host"; }
  std::vector<int> lacking() const override { return {}; }
  void abort() noexcept override {}
  std::string_view way() const override { return "staged"; }
};

/// Whether pieces need not lie together on this rank.
bool lies_on_devices(const PlacedOperand& arrays) {
  const auto lies = [](const PlacedArray& array) {
    return array.buffer.count == 0 || array.device.has_value();
  };
  return lies(arrays.input) && lies(arrays.output);
}

}  // namespace

std::shared_ptr<PieceCall> PieceCall::offer(Group& group, const Options& options,
                                            const std::vector<PlacedOperand>& arrays,
                                            const std::shared_ptr<StagedCopies>& copies) {
  const size_t piece = staged_piece_of(group, options, arrays);
  const bool by_elements = is_cut_by_elements(options.kind);
  if (piece == 0 || (!by_elements && !lies_on_devices(arrays.front()))) return nullptr;
  std::shared_ptr<PieceCall> made(new PieceCall(group, options, arrays.front(), copies, piece));
  if (!by_elements) return made;
  const auto& [input, output] = arrays.front().buffers();
  made->pieces_ =
      made->pieces_of(checked_shape(input, output, options, group.rank(), group.size()));
  return made;
}

PieceCall::PieceCall(const Group& group, const CollectiveSpec& spec, const PlacedOperand& arrays,
                     std::shared_ptr<StagedCopies> copies, size_t piece)
    : rank_(group.rank()),
      size_(group.size()),
      spec_(spec),
      arrays_(arrays),
      copies_(std::move(copies)),
      piece_(piece) {}

std::shared_ptr<StagedPieces> PieceCall::pieces_of(const Shape& shape) const {
  return StagedPieces::of(copies_, spec_, arrays_, Cut(spec_.kind, shape, piece_), rank_);
}

Backend& PieceCall::backend() {
  static ByHost by_host;
  return by_host;
}

std::shared_ptr<PiecesOnDevices> PieceCall::go_by_host(Operation& operation, size_t piece) {
  if (pieces_) return std::move(pieces_);
  try {
    if (piece > 0) return pieces_of(shape_of(operation, rank_, size_));
    const Operand lies = stage(*copies_, spec_, arrays_.input, arrays_.output, rank_);
    copies_->seal();
    operation.gate = copies_;
    operation.input = lies.input;
    operation.output = lies.output;
    return nullptr;
  } catch (const Error& error) {
    throw on_rank(error, copies_->rank());
  }
}

}  // namespace farandole
