// A collective on arrays of devices, or a message, by the staged path: copied to the host, reduced
// there by what reduces the host's arrays, and copied back. So the bits are the same, and where an
// array lies is its own rank's affair. Where all ranks' arrays lie on devices it may go by steps
// instead (step_call.h).
#pragma once

#include <memory>
#include <optional>
#include <utility>

#include "devices/staged_operation.h"

namespace farandole {

class StagedCall {
 public:
  /// As Group::submit. A failure on this rank, but for a wrong argument, fails the group, since the
  /// others may be waiting.
  static StagedCall submit(Group& group, const PlacedArray& input, const PlacedArray& output,
                           Options options, bool caller_waits);
  /// For a call that is submitted together with others: gives what is to be submitted, whose handle
  /// begin() takes.
  static StagedCall prepare(Group& group, const PlacedArray& input, const PlacedArray& output,
                            Options options, CollectiveCall& to_submit);
  void begin(const Handle& handle) { handle_ = handle; }
  /// As Group::submit_between, of an array on a device.
  static StagedCall submit_between(Group& group, int peer, int tag, const PlacedArray& array,
                                   Options options, bool caller_waits);

  /// As Group::submit_from_any, into an array on a device.
  static std::pair<StagedCall, std::shared_ptr<const int>> submit_from_any(Group& group, int tag,
                                                                           const PlacedArray& array,
                                                                           Options options);

  /// Whether it becomes part of a CUDA graph. Then its caller waits at once, before the capture
  /// ends.
  bool is_captured() const { return operation_.is_captured(); }
  bool done() const { return handle_.done(); }
  /// Waits until the operation is complete on the host, and has its result copied back. False when
  /// `until` passed first.
  bool wait(Deadline until);
  /// Then, for each caller that waits: StagedCopies::hand_over.
  void hand_over(std::optional<uint64_t> stream);

 private:
  /// Before its copies are asked for; they are the operation's gate.
  StagedCall(Group& group, Options& options, const PlacedArray& output);
  static StagedCall checked(Group& group, const PlacedArray& input, const PlacedArray& output,
                            Options& options);
  Operand offered(Group& group, Options& options, const PlacedOperand& operand);

  /// Begins the copies of an end of a message. `data`: where its array lies on the host.
  static StagedCall end_of_message(Group& group, const PlacedArray& array, Options& options,
                                   Buffer& data);

  Handle handle_;
  StagedOperation operation_;
  int device_;  // the output's; -1: the host
};

}  // namespace farandole
