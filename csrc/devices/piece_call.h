// One operation on a long array of a device that goes by the host, as this rank knows beforehand:
// in pieces, if all ranks' arrays are as they should be.
#pragma once

#include <memory>
#include <vector>

#include "devices/staged_pieces.h"

namespace farandole {

class PieceCall : public OnDevices {
 public:
  /// Null where the array is none to be cut. Else its first pieces begin to come.
  static std::shared_ptr<PieceCall> offer(Group& group, const Options& options,
                                          const std::vector<PlacedOperand>& arrays,
                                          const std::shared_ptr<StagedCopies>& copies);
  PieceCall(std::shared_ptr<StagedPieces> pieces, size_t piece);
  ~PieceCall() override;

  Backend& backend() override;
  bool declines() const override { return true; }
  size_t piece() const override { return piece_; }
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation) override;

 private:
  std::shared_ptr<StagedPieces> pieces_;
  size_t piece_;
  std::unique_ptr<Backend> backend_;  // which declines
};

}  // namespace farandole
