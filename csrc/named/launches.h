// Operations by name on their way through the engine: packed, run, unpacked.
//
//   order ─plan─► waiting ─fill─► running (in the stream of their set) ─unpack─► finished
//
// Small tensors travel together (group/pack.h); a large one goes by itself, in place.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "group/pack.h"
#include "named/request.h"

namespace farandole {

/// Used by the thread that polls the engine.
class Launches {
 public:
  Launches(Engine& engine, PackLimits limits)
      : engine_(engine), limits_(limits), packs_(engine.arena()) {}

  bool travels_alone(size_t bytes) const { return limits_.travels_alone(bytes); }

  /// Adds the next operation of the agreed order; a call that throws adds nothing. Stand-ins are
  /// owned until they have finished.
  void add(NamedRequest& request, const NamedSet& set, std::span<const int64_t> extents);
  void add_proxy(std::unique_ptr<NamedRequest> request, const NamedSet& set,
                 std::span<const int64_t> extents);
  /// Plans the operations added since the last call together: they were ordered together. A call
  /// that throws plans nothing.
  void end_round();
  /// Forgets those that were added since, for which no order holds any more; stand-ins end.
  std::vector<NamedRequest*> drop_round();

  /// Moves everything on by a bounded piece; true if anything moved. Requests that have ended are
  /// appended to `finished`.
  bool poll(std::vector<NamedRequest*>& finished);
  bool idle() const { return waiting_.empty() && running_.empty(); }

 private:
  struct OrderedPart {
    NamedRequest* request;
    size_t part;
    const NamedSet* set;
    std::shared_ptr<Request> alone;  // of an operation that is never packed
  };
  struct Launch {
    const NamedSet* set;
    std::vector<NamedRequest*> owners;  // one for each tensor
    std::shared_ptr<Request> request;
    std::shared_ptr<Pack> pack;  // of more than one tensor
  };

  std::unique_ptr<Launch> make(const std::vector<size_t>& tensors) const;
  void end_stand_in(const NamedRequest* request);
  static void fail(Launch& launch, const Error& error);
  bool prepare(Launch& launch, size_t& budget);
  void start(Launch& launch);
  bool unpack(Launch& launch, size_t& budget);
  void end(Launch& launch, std::vector<NamedRequest*>& finished);

  Engine& engine_;
  PackLimits limits_;
  std::vector<OrderedPart> round_;
  std::vector<Packable> round_arrays_;  // one for each of round_
  std::deque<std::unique_ptr<Launch>> waiting_, running_;
  std::vector<std::unique_ptr<NamedRequest>> proxies_;
  BufferPool packs_;
};

}  // namespace farandole
