// Runs one lane of a schedule over channels: one step at a time, never waiting.
#pragma once

#include <algorithm>
#include <cstddef>
#include <memory>
#include <span>

#include "base/dtype.h"
#include "base/reduce_op.h"
#include "fold/fold.h"
#include "schedule/schedule.h"
#include "stream/backend.h"
#include "stream/stream_page.h"
#include "transport/channel.h"

namespace farandole {

/// Bytes that a cursor moves before it returns, so that the caller can look at the clock: 10 µs.
inline constexpr size_t kPieceBytes = 128 * 1024;

/// Data shared by the lanes of one run. In place, input and output are the same memory.
struct LaneWork {
  int rank = 0;
  std::byte* input = nullptr;  // only read, unless it is the output too
  std::byte* output = nullptr;
  std::byte* scratch = nullptr;
  DType dtype = DType::float32;
  ReduceOp op = ReduceOp::sum;
  Scales scales;
  const StreamMemory* memory = nullptr;  // for Visits; null on all ranks: nothing is put

  std::byte* at(const Slice& slice) const;
  size_t bytes(const Slice& slice) const { return slice.count * size_of(dtype); }
};

/// Sending and receiving go through the lane's steps side by side, and arriving data are folded
/// while they are hot. Over channels that copy, neither waits for the other: bytes are sent unless
/// an earlier step has still to write them, and written unless one has still to send them. So a
/// slow link is not idle while the last of a step is on its way, or while the link back is slower,
/// and a result goes on piece by piece as it is folded. Over other channels the next step begins
/// when all is sent, received, and drained: they may still refer to bytes that they took.
class LaneCursor {
 public:
  /// `channels` holds this lane's channel to every rank that the lane names. All arguments outlive
  /// the cursor.
  LaneCursor(const LaneWork& work, const Lane& lane,
             std::span<const std::unique_ptr<Channel>> channels)
      : work_(&work), lane_(&lane), channels_(channels) {}

  /// Moves at most about kPieceBytes. Throws what a channel throws.
  Progress poll();

  // Where it stands, for the evidence of an error: in the first step that is not done.
  size_t step() const { return std::min(sending_, receiving_); }
  size_t steps() const { return lane_->size(); }
  int peer() const;  // the rank that the step waits for, or kNobody
  /// Adds all ranks that the step waits for.
  void add_lacking(std::vector<int>& ranks) const;
  size_t bytes_done() const;
  size_t bytes_total() const;

 private:
  bool go_on();
  bool move(size_t& budget);
  bool has_sent() const;
  bool has_received() const;
  bool lets_run_ahead(const Step& step) const;
  bool all_drained() const;
  bool sends(const Step& step) const;
  size_t ready_to_send() const;
  size_t ready_to_receive() const;
  size_t send(size_t budget);
  size_t put(Channel& sink, std::span<const std::byte> bytes);
  bool offer();
  size_t receive(size_t budget);
  size_t run_locally(const Step& step, size_t want);
  void take(const Step& step, const std::byte* arrived, size_t count);
  bool is_offered(const PlaceRule& rule, const Slice& slice) const;
  bool exchanges(const Step& step) const;
  bool only_moves(const Step& step) const;
  Channel& channel(int peer) const { return *channels_[static_cast<size_t>(peer)]; }

  const LaneWork* work_;
  const Lane* lane_;
  std::span<const std::unique_ptr<Channel>> channels_;
  size_t sending_ = 0, receiving_ = 0;  // steps
  size_t sent_ = 0;                     // bytes of step sending_
  size_t received_ = 0;                 // bytes of step receiving_
  bool offered_ = false;                // in step receiving_
};

}  // namespace farandole
