// One operation on a long array of a device that goes by the host, as this rank knows beforehand:
// in pieces, if all ranks' arrays are as they should be.
#pragma once

#include <memory>
#include <vector>

#include "devices/staged_pieces.h"

namespace farandole {

class PieceCall : public OnDevices {
 public:
  /// Null where the array is not cut. The first pieces of one that is cut by elements begin to come
  /// at once, since it goes in pieces for certain.
  static std::shared_ptr<PieceCall> offer(Group& group, const Options& options,
                                          const std::vector<PlacedOperand>& arrays,
                                          const std::shared_ptr<StagedCopies>& copies);

  Backend& backend() override;
  bool declines() const override { return true; }
  size_t piece() const override { return piece_; }
  std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation, size_t piece) override;

 private:
  PieceCall(const Group& group, const CollectiveSpec& spec, const PlacedOperand& arrays,
            std::shared_ptr<StagedCopies> copies, size_t piece);
  std::shared_ptr<StagedPieces> pieces_of(const Shape& shape) const;

  int rank_, size_;
  CollectiveSpec spec_;
  PlacedOperand arrays_;
  std::shared_ptr<StagedCopies> copies_;
  size_t piece_;
  std::shared_ptr<StagedPieces> pieces_;  // that come already
};

}  // namespace farandole
