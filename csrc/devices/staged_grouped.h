// Many arrays in one call, of which some lie on devices.
#pragma once

#include <map>
#include <optional>
#include <vector>

#include "devices/staged_operation.h"
#include "group/grouped.h"

namespace farandole {

class StagedGrouped {
 public:
  /// As Grouped, submitted, and of the same operations, so that other ranks' arrays may lie
  /// elsewhere. An operation whose arrays lie on one device goes by steps where those of all ranks
  /// do. Small arrays of others are packed on the host, as soon as they have come. A failure on
  /// this rank, but for a wrong argument, fails the group.
  StagedGrouped(Group& group, const std::vector<PlacedOperand>& operands, Options options,
                const PackLimits& limits, bool caller_waits);

  /// As StagedCall's.
  bool is_captured() const { return is_captured_; }
  bool done() const;
  /// Waits until all operations are complete on the host, and has the results copied back. False
  /// when `until` passed first. One thread at a time.
  bool wait(Deadline until);
  /// The index of one output on each device that has any, by device.
  const std::map<int, size_t>& outputs() const { return outputs_; }
  /// Then: StagedCopies::hand_over.
  void hand_over(int device, std::optional<uint64_t> stream);

 private:
  std::vector<StagedOperation> operations_;
  std::vector<Handle> handles_;
  std::map<int, size_t> outputs_;
  bool is_captured_ = false;
};

}  // namespace farandole
