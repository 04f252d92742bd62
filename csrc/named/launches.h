// Ordered operations by name on their way through the engine: packed, run, unpacked.
//
//   order ─cut─► waiting ─pack─► running (in the stream of their set) ─unpack─► finished
//
// Small tensors are copied into memory that all ranks map, reduced there at once, and copied back;
// a large one goes by itself, in place.
#pragma once

#include <deque>
#include <memory>
#include <vector>

#include "engine/engine.h"
#include "named/cut.h"
#include "named/request.h"
#include "transport/buffer_pool.h"

namespace farandole {

/// Used by the thread that polls the engine.
class Launches {
 public:
  struct Item {
    NamedRequest* request;
    size_t part;
  };
  Launches(Engine& engine, CutLimits limits)
      : engine_(engine), limits_(limits), packs_(engine.arena()) {}

  /// One operation that is next in the agreed order. Stand-ins are owned until they have finished.
  void add(NamedRequest& request, const NamedSet& set, std::span<const int64_t> extents);
  void add_proxy(std::unique_ptr<NamedRequest> request, const NamedSet& set,
                 std::span<const int64_t> extents);
  /// What was added since the last time was ordered together, and is cut together.
  void end_round();

  /// Moves everything on by a bounded piece; true if anything moved. Requests that have ended are
  /// appended to `finished`.
  bool poll(std::vector<NamedRequest*>& finished);
  bool idle() const { return waiting_.empty() && running_.empty(); }

 private:
  struct Launch {
    const NamedSet* set;
    std::vector<Item> items;
    std::shared_ptr<Request> request;
    std::shared_ptr<std::byte> pack;  // null: one tensor, by itself
    size_t copied = 0;                // items, into the pack or out of it
    size_t at = 0;                    // bytes of the pack that they took
  };
  struct Ordered {
    NamedRequest* request;
    size_t part;
    const NamedSet* set;
    std::shared_ptr<Request> alone;  // for what is never packed
  };

  std::unique_ptr<Launch> make(const std::vector<size_t>& items);
  bool prepare(Launch& launch, size_t& budget);
  void start(Launch& launch);
  bool unpack(Launch& launch, size_t& budget);
  void end(Launch& launch, std::vector<NamedRequest*>& finished);

  Engine& engine_;
  CutLimits limits_;
  std::vector<Ordered> round_;
  std::vector<CutItem> to_cut_;  // one for each of round_
  std::deque<std::unique_ptr<Launch>> waiting_, running_;
  std::vector<std::unique_ptr<NamedRequest>> proxies_;
  BufferPool packs_;
};

}  // namespace farandole
