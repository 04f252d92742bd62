// One operation's copies: its input on the way to the host, its result on the way back. Between
// them the host's collective runs, which knows nothing of devices.
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
};

/// As it reaches all ranks: with this one's number.
Error on_rank(const Error& error, int rank);

class StagedCopies : public Gate {
 public:
  /// `kept`: what keeps the arrays. `rank`: of the world.
  StagedCopies(std::shared_ptr<Staging> staging, std::shared_ptr<FailureDetector> detector,
               int rank, std::shared_ptr<const void> kept);
  ~StagedCopies() override;

  /// Begins the copy to the host; nothing for a rank that only gets. Where it will lie.
  std::byte* bring(const DeviceSpan& input);
  /// Where the result has to lie on the host, which will be copied to `output`: where the input
  /// does, or on its own.
  std::byte* expect(const DeviceSpan& output, bool where_input_lies);
  /// All that has to be done before the operation may begin has been asked for.
  void seal();

  bool is_open() override;
  std::string awaited() const override;

  /// Once the operation has ended well, by whoever comes first: copies the result back, and gives
  /// the blocks back. A failure is the group's, and thrown.
  void take_back();
  /// Then: whoever works on the output finds the result there, in what it puts into this stream
  /// from now on. Without one the host waits for the copy, so that it is there for all.
  void hand_over(std::optional<uint64_t> stream);

 private:
  struct Copy {
    DeviceSpan span;
    std::shared_ptr<StagingBlock> block;  // null: given back
    CopiesUntil until;
  };
  static void mark_arrival(Copy& copy);
  [[noreturn]] void fail(const Error& error);
  void give_back();
  void look_for_loss();

  std::shared_ptr<Staging> staging_;
  std::shared_ptr<FailureDetector> detector_;
  int rank_;
  std::shared_ptr<const void> kept_;
  std::optional<Copy> input_, output_;
  TimePoint next_look_{};  // of the thread that polls
  std::mutex mutex_;       // guards the rest, and what take_back() does
  bool taken_back_ = false, handed_over_ = false;
  std::optional<Error> failure_;
};

}  // namespace farandole
