// One call's copies: its inputs on the way to the host, its results on the way back. Between them
// the host's collective runs, which knows nothing of devices.
#pragma once

#include <atomic>
#include <mutex>
#include <optional>
#include <string>

#include "control/failure_detector.h"
#include "devices/staging.h"

namespace farandole {

/// Memory of a device.
struct DeviceSpan {
  std::shared_ptr<DeviceQueue> queue;
  uint64_t address = 0;
  size_t bytes = 0;
  std::optional<uint64_t> stream = {};  // of its owner, where that is known
  std::optional<uint64_t> graph = {};   // the same, where it is being captured
};

/// The error as all ranks get it: with this rank's number.
Error on_rank(const Error& error, int rank);

class StagedCopies : public Gate {
 public:
  /// `kept`: what keeps the arrays. `rank`: of the world.
  StagedCopies(std::shared_ptr<Staging> staging, std::shared_ptr<FailureDetector> detector,
               int rank, std::shared_ptr<const void> kept);
  ~StagedCopies() override;

  Staging& staging() const { return *staging_; }
  int rank() const { return rank_; }  // of the world

  /// Begins the copy of an input to the host. Returns its memory there.
  std::byte* bring(const DeviceSpan& input);
  /// Memory on the host for a result that will be copied to `output`: that of the last input, which
  /// has the same queue, or its own.
  std::byte* expect(const DeviceSpan& output, bool where_input_lies);
  /// All that has to be done before the operation may begin has been asked for.
  void seal();

  /// Instead of all that: arrays and results are copied in pieces (StagedPieces).
  void leave_to_pieces(const DeviceSpan* input, const DeviceSpan* output);
  /// No other piece is copied; these blocks are given back once all have been. `have_come`: all
  /// pieces are here.
  void end_pieces(const std::vector<std::shared_ptr<StagingBlock>>& blocks, bool have_come);

  bool is_open() override;
  std::string awaited() const override;

  /// Once the operation has succeeded on the host: the first call copies results back, and returns
  /// the blocks. A failure is the group's, and thrown.
  void take_back();
  /// Then: later work in `stream` finds the results in this device's outputs. Without a stream the
  /// host waits for the copies, so that the results are there for all.
  void hand_over(int device, std::optional<uint64_t> stream);

 private:
  struct Copy {
    DeviceSpan span;
    std::shared_ptr<StagingBlock> block;  // null: an output has it, or it was given back
    CopiesUntil until;
  };
  [[noreturn]] void fail(const Error& error);
  void give_back();
  void look_for_loss();

  std::shared_ptr<Staging> staging_;
  std::shared_ptr<FailureDetector> detector_;
  int rank_;
  std::shared_ptr<const void> kept_;
  std::vector<Copy> inputs_, outputs_;
  LossWatch watch_;   // of the thread that polls
  std::mutex mutex_;  // guards the rest, and what take_back() does
  bool taken_back_ = false, handed_over_ = false;
  std::optional<Error> failure_;
};

}  // namespace farandole
