#include "devices/piece_call.h"

#include <utility>

#include "stream/backend.h"

namespace farandole {
namespace {

/// Runs nothing: ranks agree on the operation as a whole before its pieces.
class ByHost : public Backend {
 public:
  std::string_view name() const override { return "devices"; }
  bool can_run(const Operation&) const override { return true; }
  void refuse(const Operation&) const override {}
  std::string ways_for(const Operation&) const override { return "staged"; }
  void start(const Operation&, uint32_t) override {}
  Progress poll(TimePoint) override { return Progress::finished; }
  std::string declined() const override { return "it goes by the host in pieces"; }
  std::vector<int> lacking() const override { return {}; }
  void abort() noexcept override {}
  std::string_view way() const override { return "staged"; }
};

}  // namespace

std::shared_ptr<PieceCall> PieceCall::offer(Group& group, const Options& options,
                                            const std::vector<PlacedOperand>& arrays,
                                            const std::shared_ptr<StagedCopies>& copies) {
  const size_t piece = piece_of(group, options, arrays);
  if (piece == 0) return nullptr;
  const auto& [input, output] = arrays.front();
  checked_shape(input.buffer, output.buffer, options, group.rank(), group.size());
  return std::make_shared<PieceCall>(
      StagedPieces::of(copies, options, arrays.front(), piece, group.rank()), piece);
}

PieceCall::PieceCall(std::shared_ptr<StagedPieces> pieces, size_t piece)
    : pieces_(std::move(pieces)), piece_(piece), backend_(std::make_unique<ByHost>()) {}

PieceCall::~PieceCall() = default;

Backend& PieceCall::backend() { return *backend_; }

std::shared_ptr<PiecesOnDevices> PieceCall::go_by_host(Operation&) { return std::move(pieces_); }

}  // namespace farandole
