// A collective on arrays of devices, or a message, by the staged path: copied to the host, reduced
// there by what reduces the host's arrays, and copied back. So the bits are the same, and where an
// array lies is its own rank's affair. Where all ranks' arrays lie on devices it may go by steps
// instead (step_call.h).
#pragma once

#include <memory>
#include <optional>
#include <utility>
#include <vector>

#include "devices/staged_copies.h"
#include "group/group.h"
#include "group/pack.h"

namespace farandole {

class StepCall;

/// An array: on a device if `device` says so, and then `buffer` has its address there.
struct PlacedArray {
  Buffer buffer;
  std::optional<DeviceSpan> device;
};

/// One array of a call: what goes in and what comes out.
struct PlacedOperand {
  PlacedArray input, output;

  Operand buffers() const { return {input.buffer, output.buffer}; }
};

/// Where the arrays of one operation lie on the host, and the copies of what has to be brought.
Operand stage(StagedCopies& copies, const Options& options, const PlacedArray& input,
              const PlacedArray& output, int rank);

/// A call's copies: the gate of its operations, and what keeps its arrays.
std::shared_ptr<StagedCopies> copies_for(Group& group, Options& options);

/// The same of all arrays of an operation, with their copies sealed.
struct StagedArrays {
  Operand whole;
  std::shared_ptr<Pack> pack;  // of more than one
};
StagedArrays stage_all(StagedCopies& copies, const Options& options,
                       const std::vector<PlacedOperand>& arrays, int rank, int size,
                       BufferPool& pool);

class StagedCall {
 public:
  /// As Group::submit. Whatever else than an argument fails on this rank fails the group: the
  /// others may be waiting for it.
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

  bool done() const { return handle_.done(); }
  /// Waits until the operation is complete on the host, and has its result copied back. False when
  /// `until` passed first.
  bool wait(Deadline until);
  /// Then, as often as somebody waits: StagedCopies::hand_over.
  void hand_over(std::optional<uint64_t> stream);

 private:
  /// Before its copies are asked for; they are the operation's gate.
  StagedCall(Group& group, Options& options, const PlacedArray& output);
  static StagedCall checked(Group& group, const PlacedArray& input, const PlacedArray& output,
                            Options& options);
  /// What is submitted: the arrays where they are, if they may go by steps, or where they lie on
  /// the host, their copies begun.
  Operand offered(Group& group, Options& options, const PlacedOperand& operand);

  /// Begins the copies of an end of a message. `data`: where its array lies on the host.
  static StagedCall end_of_message(Group& group, const PlacedArray& array, Options& options,
                                   Buffer& data);

  Handle handle_;
  std::shared_ptr<StagedCopies> copies_;
  int device_;                      // the output's; -1: the host
  std::shared_ptr<StepCall> step_;  // null: it goes by the host for certain
};

/// What `act` returns. An error of a device on this rank reaches all ranks.
template <typename Act>
auto or_fail_group(Group& group, const Act& act) {
  try {
    return act();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::invalid_argument || error.code() == ErrorCode::forked) throw;
    const Error named = on_rank(error, group.engine()->host().rank);
    group.abort(named);
    throw Error(named);
  }
}

}  // namespace farandole
