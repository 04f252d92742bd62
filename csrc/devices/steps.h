// The steps of one stream's collectives on one device: of a group's program, made where such a call
// is first met, or of whoever has a stream of its own.
#pragma once

#include <atomic>
#include <memory>
#include <mutex>
#include <set>

#include "devices/graph_backend.h"
#include "devices/step_backend.h"
#include "group/group.h"

namespace farandole {

class Steps : public Task, public std::enable_shared_from_this<Steps> {
 public:
  /// The group's, made for this device if there are none yet; null where they are another device's,
  /// or the group cannot have any. Any thread; the first call takes long.
  static std::shared_ptr<Steps> of(Group& group, int device);
  /// Of a stream of the group's, as long as that is there; null where the group cannot have any.
  static std::shared_ptr<Steps> of_stream(Group& group, const std::shared_ptr<Stream>& stream,
                                          int device);

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
  /// Null where this rank has no streams on the device: then it takes part all the same, to say so.
  const std::shared_ptr<DeviceExchange>& exchange() const { return exchange_; }

  /// Calls that did not go by steps are not tried again. `call`: any hash of what ranks agree on.
  bool worth_trying(uint64_t call) const;
  void note_failed(uint64_t call);

  bool poll(TimePoint until) override;
  void look_around(TimePoint now) override;

 private:
  enum class InGraphs : uint8_t { no, yes };
  PeerOffer open_exchange(const Group& group, std::shared_ptr<DeviceExchange>& exchange,
                          InGraphs in_graphs) const;
  void part();
  bool is_dead(int member) const;

  Engine& engine_;
  uint64_t key_;
  std::weak_ptr<const void> owner_;
  int device_;
  std::shared_ptr<DeviceExchange> exchange_;
  std::optional<StepWatch> watch_;
  std::optional<StepBackend> backend_;
  mutable std::mutex mutex_;  // guards failed_ and the making of graphs_
  std::set<uint64_t> failed_;
  std::unique_ptr<GraphBackend> graphs_;
  std::atomic<GraphBackend*> made_graphs_{nullptr};  // released once they are made
};

}  // namespace farandole
