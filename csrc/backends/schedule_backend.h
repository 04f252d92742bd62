// Every collective on host memory over any transport: choose a planner, run its schedule's lanes.
#pragma once

#include <cstdint>
#include <list>
#include <memory>
#include <vector>

#include "backends/lane_cursor.h"
#include "schedule/planners.h"
#include "stream/backend.h"
#include "transport/segment.h"
#include "transport/transport.h"

namespace farandole {

/// The ranks that a backend serves. Channels are by rank in the group.
struct ScheduleGroup {
  int rank = 0;
  int size = 1;
  std::vector<int> host_of{};  // each rank's host, by any numbers; empty: all share one
};

/// Lanes and segments of a schedule: the same on every rank, since the question is.
struct Split {
  int lanes = 1;
  int segments = 1;
  bool operator==(const Split&) const = default;
};
Split default_split(size_t bytes, const ChannelCosts& costs = {});

/// Memory of a run between input and output. Grows, never shrinks, moves nothing when it is enough.
class Scratch {
 public:
  explicit Scratch(std::shared_ptr<Arena> arena) : arena_(std::move(arena)) {}
  ~Scratch() { release(); }
  Scratch(const Scratch&) = delete;
  Scratch& operator=(const Scratch&) = delete;

  std::byte* at_least(size_t bytes);
  /// It is never released.
  void keep_for_ever();

 private:
  void release();

  std::shared_ptr<Arena> arena_;  // null: the heap
  std::unique_ptr<std::byte[]> heap_;
  std::byte* data_ = nullptr;
  size_t bytes_ = 0;
};

class ScheduleBackend : public Backend {
 public:
  /// The channels that every connection has, and so the most lanes of a schedule.
  static constexpr int kMaxLanes = 4;

  /// Scratch memory comes from `arena` where there is one, so that channels may refer to it instead
  /// of copying. `costs` are the same on all ranks. With `memory`, the stream's, ranks put data
  /// into each other's.
  ScheduleBackend(ScheduleGroup group, Connect connect, std::shared_ptr<Arena> arena = nullptr,
                  ChannelCosts costs = {}, const StreamMemory* memory = nullptr);

  static constexpr std::string_view kName = "schedule";
  std::string_view name() const override { return kName; }
  bool can_run(const Operation& operation) const override;
  void refuse(const Operation& operation) const override;
  std::string ways_for(const Operation&) const override { return "schedules"; }
  void start(const Operation& operation, uint32_t sequence) override;
  Progress poll(TimePoint until) override;
  std::vector<int> lacking() const override;
  /// Where data were in flight the channels stop in the middle of something, so they are closed
  /// once they have let go: nothing runs afterwards.
  void abort() noexcept override;
  Held let_go() noexcept override;
  std::string_view way() const override { return kName; }

  /// The prediction for the planner that would be chosen.
  double predicted_seconds(const Operation& operation) const;

 private:
  /// Everything that this rank's schedule follows from.
  struct Question {
    Collective kind;
    std::string algorithm;
    Determinism level;
    size_t element;  // bytes
    size_t count;
    std::vector<size_t> counts;
    int root;
    bool operator==(const Question&) const = default;
  };
  struct Plan {
    Question question;
    Schedule schedule;
    std::vector<int> peers;
  };

  Shape shape_of(const Operation& operation) const;
  const Planner& planner_of(const Operation& operation, const Shape& shape) const;
  const Plan& plan_for(const Operation& operation);
  bool connect(bool& moved);
  void begin_lanes();
  Progress poll_lanes(TimePoint until);
  Progress poll_lane(size_t lane);
  [[noreturn]] void rethrow(const Error& error, size_t lane) const;
  void forget();

  ScheduleGroup group_;
  Connect connect_;
  ChannelCosts costs_;
  const StreamMemory* memory_;
  Scratch scratch_;
  std::list<Plan> plans_;                                        // newest use first
  std::vector<std::unique_ptr<Connecting>> connecting_;          // by rank
  std::vector<std::vector<std::unique_ptr<Channel>>> channels_;  // by lane, then by rank
  bool aborted_ = false;

  // The operation in flight.
  const Operation* operation_ = nullptr;
  uint32_t sequence_ = 0;
  const Plan* plan_ = nullptr;
  LaneWork work_;
  std::vector<LaneCursor> cursors_;  // by lane, once every peer is connected
  std::vector<bool> lane_finished_;
  size_t lanes_left_ = 0;
  size_t next_lane_ = 0;
  bool lanes_begun_ = false;
};

}  // namespace farandole
