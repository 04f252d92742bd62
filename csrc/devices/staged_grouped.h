// Many arrays in one call, of which some lie on devices.
#pragma once

#include <map>
#include <memory>
#include <optional>
#include <vector>

#include "devices/staged_call.h"
#include "group/grouped.h"

namespace farandole {

/// One array of the call: what goes in and what comes out.
struct PlacedOperand {
  PlacedArray input, output;
};

class StagedGrouped {
 public:
  /// As Grouped, submitted. Small arrays are packed on the host, as soon as all arrays of the call
  /// have come. Whatever else than an argument fails on this rank fails the group.
  StagedGrouped(Group& group, const std::vector<PlacedOperand>& operands, Options options,
                const PackLimits& limits, bool caller_waits);

  bool done() const { return grouped_->done(); }
  /// Waits until all operations are complete on the host, and has the results copied back. False
  /// when `until` passed first.
  bool wait(Deadline until);
  /// Of each device with outputs, one of them.
  const std::map<int, size_t>& outputs() const { return outputs_; }
  /// Then: StagedCopies::hand_over.
  void hand_over(int device, std::optional<uint64_t> stream) { copies_->hand_over(device, stream); }

 private:
  std::shared_ptr<StagedCopies> copies_;
  std::unique_ptr<Grouped> grouped_;
  std::map<int, size_t> outputs_;
};

}  // namespace farandole
