// One rank's end of an exchange between devices, as the ranks of a world meet for it.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <set>
#include <span>

#include "cuda/exchange/exchange.h"
#include "devices/peers.h"

namespace farandole {

/// The events of an operation: its arrays are ready, and it is complete. Returned to its exchange.
using StepMoments = std::shared_ptr<cuda::Moments>;

/// What a rank offers the others, so that they map its bucket. A descriptor goes with it, or there
/// is a handle; then the bucket's owner must be the last to release it.
struct BucketOffer {
  cuda::AllocationId id;
  uint64_t bytes;
  cuda::DeviceUuid device;
  uint32_t multiprocessors;
  bool by_handle;
  bool takes_turns;  // with other processes on the device
  bool multicast;    // as of DeviceProperties
  cuda::IpcMemoryHandle handle;
};

/// By one thread at a time, but for what says otherwise. Functions throw Error(device) and the
/// like.
class DeviceExchange : public cuda::Exchange, public std::enable_shared_from_this<DeviceExchange> {
 public:
  /// Where it is in graphs, it outlives its last user until those are gone.
  static std::shared_ptr<DeviceExchange> open(const CudaExchangeShape& shape);

  int ordinal() const { return device().ordinal; }
  /// Opens this rank's bucket. Returns a BucketOffer.
  PeerOffer offer_bucket();
  /// The buckets of all others, as they were offered: maps them, and writes to them what shows that
  /// it arrives. `own`: this rank's place.
  void map_all(int own, std::span<const PeerOffered> all);
  /// Once all have done so: PeerMeeting::Check.
  std::optional<uint32_t> check_links();
  /// Does what the checks of all ranks ask for.
  void heed(uint32_t notes);

  /// Ready once the work now in these streams is done. Any thread.
  StepMoments moments_after(const std::set<uint64_t>& streams, bool timed);
  /// Whether kernels can apply a factor to what NCCL has reduced.
  bool scales_results();

 private:
  using Exchange::Exchange;
};

}  // namespace farandole
