// Rings in the heap: ranks that are threads of one process, or all simulated by one thread.
#pragma once

#include <compare>
#include <cstdint>
#include <map>
#include <memory>
#include <mutex>

#include "transport/transport.h"

namespace farandole {

/// Where the ranks of one process meet. Any thread.
class InprocHub {
 public:
  static constexpr size_t kRingBytes = 64 * 1024;

  /// `ring_bytes`, a power of two, is what a channel holds until its reader consumes.
  explicit InprocHub(size_t ring_bytes = kRingBytes) : ring_bytes_(ring_bytes) {}

  struct Pipe;
  struct Key {
    uint64_t stream_key;
    int from, to, lane;
    auto operator<=>(const Key&) const = default;
  };

  /// The ring of `key`, made for the side that asks first. The hub forgets it when the second has
  /// it too: after that the two channels own it.
  std::shared_ptr<Pipe> meet(const Key& key);

 private:
  size_t ring_bytes_;
  std::mutex mutex_;  // guards waiting_
  std::map<Key, std::shared_ptr<Pipe>> waiting_;
};

/// The transport of one rank; it reaches every rank of the hub.
std::unique_ptr<Transport> inproc_transport(std::shared_ptr<InprocHub> hub, int rank);

}  // namespace farandole
