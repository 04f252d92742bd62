// One rank's end of an exchange between devices (base/cuda_table.h).
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>
#include <utility>
#include <vector>

#include "devices/device_queue.h"
#include "devices/peers.h"

namespace farandole {

/// The events of an operation: its arrays are ready, and it is complete. Returned to its exchange.
using StepMoments = std::shared_ptr<CudaMoments>;

/// By one thread at a time, but for what says otherwise. Functions throw Error(device) and the
/// like.
class DeviceExchange : public std::enable_shared_from_this<DeviceExchange> {
 public:
  explicit DeviceExchange(const CudaExchangeShape& shape);

  int device() const { return device_; }
  /// Opens this rank's bucket. Returns what others need to map it: a CudaShare and a descriptor.
  PeerOffer open_bucket();
  /// The buckets of all others, as they were offered: maps them, and writes to them what shows that
  /// it arrives. `own`: this rank's place.
  void map_all(int own, std::span<const PeerOffered> all);
  /// Once all have done so: PeerMeeting::Check.
  std::optional<uint32_t> check_links();
  /// Does what the checks of all ranks ask for.
  void heed(uint32_t notes);
  /// Stops using other ranks' memory. Nothing may begin afterwards.
  void let_go_of_peers() { library_.let_go_of_peers(exchange_.get()); }

  /// Ready once the work now in these streams is done. Any thread.
  StepMoments moments(const std::set<uint64_t>& streams, bool timed);
  /// Requires timed moments, of an operation that is complete.
  CudaTimes times_of(const CudaMoments& moments) const {
    CudaTimes times{};
    ask_cuda(library_.times_of, &moments, &times);
    return times;
  }

  void begin(CudaMoments& moments, size_t strands) {
    ask_cuda(library_.begin, exchange_.get(), &moments, strands);
  }
  void run(const CudaPiece& piece) { ask_cuda(library_.run, exchange_.get(), &piece); }
  /// Bytes that spin() takes; 0: ranks' kernels may not count on running at once.
  size_t spin_bytes(bool granted) const {
    return library_.spin_bytes(exchange_.get(), granted ? 1 : 0);
  }
  void spin(const CudaPiece& piece, bool granted) {
    ask_cuda(library_.spin, exchange_.get(), &piece, granted ? 1 : 0);
  }
  /// No lanes: likewise.
  CudaLaneRoom lane_room(bool granted) const {
    CudaLaneRoom room{};
    library_.lane_room(exchange_.get(), granted ? 1 : 0, &room);
    return room;
  }
  void run_lanes(const CudaLanes& lanes, const CudaPiece& piece, bool granted) {
    ask_cuda(library_.run_lanes, exchange_.get(), &lanes, &piece, granted ? 1 : 0);
  }
  /// A number that is reached when all of it is done.
  uint32_t end(CudaMoments& moments);

  // ---- where the shape says `captured`, in place of begin and end ----

  void begin_captured(uint64_t stream, uint32_t number) {
    ask_cuda(library_.begin_captured, exchange_.get(), stream, number);
  }
  void end_captured() { ask_cuda(library_.end_captured, exchange_.get()); }
  /// Costs nothing. Any thread.
  bool graphs_are_wrong() const { return library_.graphs_are_wrong(exchange_.get()) != 0; }
  /// Graphs that are launched from now on wait for no rank; their results mean nothing.
  void give_up_graphs() noexcept { library_.give_up_graphs(exchange_.get()); }
  /// Costs nothing. Any thread.
  CudaGraphState graph_state() const {
    CudaGraphState state{};
    library_.graph_state(exchange_.get(), &state);
    return state;
  }

  /// Whether some ranks' processes take turns on a device. Costs nothing.
  bool take_turns() const { return library_.take_turns(exchange_.get()) != 0; }
  /// Whether another piece can be launched without blocking the caller. Costs nothing.
  bool has_room() const { return library_.has_room(exchange_.get()) != 0; }
  /// Costs nothing. Any thread.
  bool is_complete(uint32_t number) const {
    return library_.is_complete(exchange_.get(), number) != 0;
  }
  /// The rank's doorbell rings when the operation is complete.
  void ring_after(const CudaMoments& moments) {
    ask_cuda(library_.ring_after, exchange_.get(), &moments);
  }
  /// Later work in `stream` waits for the operation. Any thread.
  void complete_before(const CudaMoments& moments, uint64_t stream) {
    ask_cuda(library_.complete_before, exchange_.get(), &moments, stream);
  }
  /// Throws where nothing will be complete any more.
  void look_for_loss() { ask_cuda(library_.look_for_lost_exchange, exchange_.get()); }
  /// The members whose devices keep the others waiting, one bit each (cuda_table.h).
  CudaLate look_for_late() {
    CudaLate late{};
    ask_cuda(library_.look_for_late, exchange_.get(), &late);
    return late;
  }
  /// Keeps arrays of an incomplete operation until this ends, which waits for its streams.
  void keep(std::shared_ptr<const void> arrays) { kept_.push_back(std::move(arrays)); }
  /// After ranks have failed: ends their waits. To be called again until all is complete.
  void drain() { ask_cuda(library_.drain, exchange_.get()); }

  // ---- by NCCL ----

  /// Its version (22005: 2.20.5). Throws where this rank has none.
  int find_nccl();
  /// Identifies the device, since NCCL takes one rank on each, unless it is told otherwise.
  std::string bus_id() const;
  /// The id by which ranks find each other. Any rank may make it.
  CudaNcclId make_nccl_id();
  /// Whether kernels can apply a factor to what NCCL has reduced.
  bool scales_results();
  void open_nccl(const CudaNcclId& id) { ask_cuda(library_.open_nccl, exchange_.get(), &id); }
  bool nccl_ready() {
    int32_t ready = 0;
    ask_cuda(library_.nccl_ready, exchange_.get(), &ready);
    return ready != 0;
  }
  void run_nccl(const CudaNcclJob& job) { ask_cuda(library_.run_nccl, exchange_.get(), &job); }
  void look_for_nccl_failure() { ask_cuda(library_.look_for_nccl_failure, exchange_.get()); }
  void abort_nccl() noexcept { library_.abort_nccl(exchange_.get()); }

 private:
  const CudaTable& library_;
  int device_;
  std::vector<std::shared_ptr<const void>> kept_;
  std::unique_ptr<CudaExchange, void (*)(CudaExchange*)> exchange_;  // ends before what it uses
};

}  // namespace farandole
