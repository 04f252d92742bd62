// The copies of one operation on a long array, piece by piece: while the host reduces one, the next
// one comes, and the result of the one before goes back. They lie in a few blocks, which are used
// in turn, so the memory for it does not grow with the array.
#pragma once

#include <array>
#include <memory>
#include <vector>

#include "devices/staged_arrays.h"
#include "stream/pieces.h"

namespace farandole {

/// The piece size, as Cut takes it, for checked arrays of such a call that go by the host, on every
/// rank that has them on devices. 0: as a whole.
size_t staged_piece_of(const Group& group, const Options& options,
                       const std::vector<PlacedOperand>& arrays);

class StagedPieces : public PiecesOnDevices,
                     public Gate,
                     public std::enable_shared_from_this<StagedPieces> {
 public:
  /// Begins to bring the first pieces. `copies`: of the call; they are left to the pieces. `rank`:
  /// of the group.
  static std::shared_ptr<StagedPieces> of(std::shared_ptr<StagedCopies> copies,
                                          const CollectiveSpec& spec, const PlacedOperand& arrays,
                                          Cut cut, int rank);
  ~StagedPieces() override;

  void begin(Operation& piece) override;
  void end() override;

  /// Whether the piece that was begun has come, and its result has room.
  bool is_open() override;
  std::string awaited() const override;

 private:
  static constexpr size_t kAtOnce = 3;  // one comes, one is reduced, and one goes
  /// The blocks of one piece; pieces use the places in turn.
  struct Place {
    std::shared_ptr<StagingBlock> input, output;  // one and the same, if they share it
    uint32_t input_has_come = 0, output_is_free = 0;
  };

  StagedPieces(std::shared_ptr<StagedCopies> copies, const CollectiveSpec& spec,
               const PlacedOperand& arrays, Cut cut, int rank);
  Place& place_of(size_t index) { return places_[index % kAtOnce]; }
  void borrow();
  void bring_next();
  void take_back(size_t index);
  void end_all();
  void look_for_loss();

  std::shared_ptr<StagedCopies> copies_;
  PlacedOperand arrays_;
  StagedEnds ends_;
  Cut cut_;
  size_t width_;  // bytes of an element
  std::array<Place, kAtOnce> places_;
  size_t brought_ = 0, ended_ = 0;  // pieces
  bool all_ended_ = false;
  LossWatch watch_;
};

}  // namespace farandole
