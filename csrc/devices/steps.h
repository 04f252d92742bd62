// The steps of one stream's collectives on one device. The stream is that of a group's program, and
// the first such call makes the steps, or it has another owner.
#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <set>

#include "devices/graph_backend.h"
#include "devices/step_backend.h"
#include "group/group.h"

namespace farandole {

class Steps : public Task, public std::enable_shared_from_this<Steps> {
 public:
  /// Why the group's devices share no buckets, as all its ranks know beforehand: NCCL alone may run
  /// its steps. Empty: they may.
  static std::string why_no_buckets(const Group& group);
  /// The steps of the group's program, made for this device if there are none yet. Null where they
  /// are another device's. Any thread; the first call takes long.
  static std::shared_ptr<Steps> of(Group& group, int device);
  /// The same for another stream of the group.
  static std::shared_ptr<Steps> of(Group& group, const std::shared_ptr<Stream>& stream, int device);

  /// `key`: of the stream. They end when `owner` has gone.
  Steps(Group& group, uint64_t key, std::weak_ptr<const void> owner, int device);
  /// By the end of the engine, or of the group: waits for other ranks at the former alone.
  ~Steps() override;
  Steps(const Steps&) = delete;
  Steps& operator=(const Steps&) = delete;

  StepBackend& backend() { return *backend_; }
  /// For what becomes part of CUDA graphs: made where that is first met. Any thread; the first call
  /// takes long.
  GraphBackend& graphs(Group& group);
  int device() const { return device_; }
  /// Null if this rank has no streams on the device. It still takes part, so that the others learn.
  const std::shared_ptr<DeviceExchange>& exchange() const { return exchange_; }
  /// Null without an exchange. `streams`: in which the operation's arrays are made, so that it
  /// waits for nothing else. The moments are timed while the engine is traced. Any thread.
  StepMoments moments(const std::set<uint64_t>& streams) const {
    return exchange_ ? exchange_->moments_after(streams, engine_.trace() != nullptr) : nullptr;
  }

  /// For an operation that went by steps, once it is complete on the host: later work in `stream`
  /// finds the result in its output. Without a stream the host waits for the device, and throws
  /// what an interruption raises. Throws the verdict where the ranks have failed meanwhile. Any
  /// thread.
  void hand_over(const StepArrays& arrays, std::optional<uint64_t> stream);

  /// Calls that did not go by steps are not tried again. `call`: any hash of what ranks agree on.
  bool worth_trying(uint64_t call) const;
  void note_failed(uint64_t call);

  bool poll(TimePoint until) override;
  void before_park() override { watch_->before_park(); }
  void look_around(TimePoint now) override;
  bool is_awaited() const override { return true; }
  void leave() override;

 private:
  enum class InGraphs : uint8_t { no, yes };
  static std::shared_ptr<Steps> of_owner(Group& group, uint64_t key,
                                         const std::shared_ptr<const void>& owner, int device);
  void check(const StepArrays& arrays) const;
  void await(const StepArrays& arrays) const;
  PeerOffer open_exchange(const Group& group, std::shared_ptr<DeviceExchange>& exchange,
                          InGraphs in_graphs) const;
  void part();
  bool is_dead(int member) const;

  Engine& engine_;
  uint64_t key_;
  std::weak_ptr<const void> owner_;
  std::function<void()> interrupted_;  // of the group's defaults
  int device_;
  std::shared_ptr<DeviceExchange> exchange_;
  std::optional<StepWatch> watch_;
  std::optional<StepBackend> backend_;
  mutable std::mutex mutex_;  // guards failed_ and the making of graphs_
  std::set<uint64_t> failed_;
  std::unique_ptr<GraphBackend> graphs_;
  std::atomic<GraphBackend*> made_graphs_{nullptr};  // released once they are made
  bool left_ = false;
};

}  // namespace farandole
