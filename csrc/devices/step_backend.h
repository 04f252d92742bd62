// Collectives on arrays of devices, step by step in the devices' streams: into the bucket, meet,
// fold the own part of all buckets, meet, out of the bucket. The host launches the steps and waits
// for none of them; no two ranks' kernels have to run at once. Where they may, one kernel does all
// of a small all-reduce or runs a schedule, or NCCL does all of any.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "devices/device_paths.h"
#include "devices/nccl_meeting.h"
#include "devices/step_pieces.h"
#include "devices/step_watch.h"
#include "stream/backend.h"

namespace farandole {

/// No stream's number. With a stream's key it makes the key (stream_key) of its steps' meeting.
inline constexpr uint64_t kStepsNumber = (uint64_t{1} << 62) + 16;

/// Runs the operations of one stream. By the thread that polls.
class StepBackend : public Backend {
 public:
  /// `key`: the stream's. `exchange` is null where this rank has no streams there; `bucket` says
  /// why it has none. `no_buckets`: why ranks do not meet to share buckets at all, as all of them
  /// know beforehand.
  StepBackend(const Engine& engine, const Membership& membership, uint64_t key,
              std::shared_ptr<DeviceExchange> exchange, PeerOffer bucket, std::string no_buckets,
              StepWatch& watch);

  const Membership& membership() const { return membership_; }
  /// Once ranks have met: their parting, where they have mapped memory whose owner must be the last
  /// to release it. Else null.
  PeerParting* parting() { return parting_ ? &*parting_ : nullptr; }
  /// Ends the meetings, since this rank ends.
  void stop_meeting();
  /// As stop_meeting(), and nothing is launched any more.
  void leave();
  /// No operation is launched in part, nor was one that failed.
  bool rests() const { return !begun_ || next_ == count_; }

  /// Before the operation starts: its arrays, which only this rank knows.
  void take(StepArrays& arrays) { arrays_ = &arrays; }

  std::string_view name() const override { return "devices"; }
  bool can_run(const Operation&) const override { return true; }
  void refuse(const Operation&) const override {}
  std::string ways_for(const Operation&) const override { return "step, spin, lanes, nccl"; }
  void start(const Operation& operation, uint32_t sequence) override;
  Progress poll(TimePoint until) override;
  std::string declined() const override { return declined_; }
  std::vector<int> lacking() const override;
  void abort() noexcept override;
  /// StepWatch finds the late device of an operation that is launched in part.
  bool minds_deadline() const override { return in_part_ && next_ < count_; }
  std::string_view way() const override { return name_of(way_); }

 private:
  bool have_met();
  Progress wait_for_room();
  void end_meeting();
  DeviceAsked asked() const;
  bool meet_in_nccl();
  bool goes_in_pieces() const;
  bool is_asked(DeviceWay way) const;
  Shape shape_here() const;
  CollectiveSpec spec_here() const;
  void choose();
  void begin();
  StepInFlight in_flight();
  size_t spin_bytes() const;
  void run_piece(size_t index);
  void run_lanes(size_t index);
  void run_nccl();
  bool is_launched();
  TraceEvent shown_in(Trace& trace);
  void end();
  void end_in_part() noexcept;

  const Engine& engine_;
  Membership membership_;
  uint64_t stream_, key_;  // the stream's, and our own
  std::shared_ptr<DeviceExchange> exchange_;
  size_t piece_bytes_;
  StepWatch& watch_;
  std::optional<PeerMeeting> meeting_;  // until all have met, where they do
  std::string no_buckets_;              // why none; the same on all ranks
  bool must_part_ = false;
  bool switched_ = false;               // a switch joins all of them
  std::optional<PeerParting> parting_;  // once they have met
  std::optional<NcclMeeting> nccl_;     // from the first operation that would go by NCCL
  std::string no_nccl_;                 // likewise

  // The operation in flight.
  const Operation* operation_ = nullptr;
  uint32_t sequence_ = 0;
  StepArrays* arrays_ = nullptr;
  StepPieces pieces_;
  size_t count_ = 0, next_ = 0;  // of pieces
  DeviceWay way_ = DeviceWay::step;
  const Planner* planner_ = nullptr;  // whose schedule lanes run
  cuda::LaneRoom lane_room_{};
  std::string declined_;
  bool left_ = false;
  bool begun_ = false, in_part_ = false;  // its begin is in the streams, its end is not
  TimePoint asked_nccl_{}, crowded_since_{};

  Trace* traced_ = nullptr;
  uint32_t track_ = 0;  // there
};

}  // namespace farandole
