// One channel over MPI, as the port sees it (transport/mpi_port.h).
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <deque>
#include <memory>
#include <utility>

#include "base/clock.h"
#include "transport/mpi_functions.h"

namespace farandole {

struct MpiLink;

/// Its bytes, both ways.
struct MpiPipe {
  using Key = std::pair<uint64_t, int>;  // of the stream; the lane
  using Buffer = std::unique_ptr<std::byte[]>;

  /// Bytes that have arrived: [begin, end) of `bytes`, or of `place`.
  struct Piece {
    Buffer bytes{};
    size_t begin = 0, end = 0;
    bool whole = false;          // as long as any buffer of the port
    std::byte* place = nullptr;  // in memory of the channel's user
    bool straight = false;       // it came in no frame
    size_t size() const { return end - begin; }
    std::byte* data() const { return (place != nullptr ? place : bytes.get()) + begin; }
  };

  /// A receive that has been posted for bytes without a frame.
  struct Awaited {
    Buffer bytes{};
    std::byte* place = nullptr;
    size_t count = 0, here = 0;
    int tag = 0;
    bool over = false;   // the peer sends nothing there any more
    bool burnt = false;  // whatever comes is too late
    MpiRequest request{};
    std::byte* memory() const { return place != nullptr ? place : bytes.get(); }
  };

  /// Where the peer takes bytes without a frame.
  struct Granted {
    size_t count = 0;
    int tag = 0;
  };

  MpiLink* link = nullptr;
  Key key{};
  std::deque<Piece> arrived;
  size_t count = 0;   // bytes in it
  size_t framed = 0;  // that came in frames, and are not consumed
  size_t owed = 0;    // consumed, and not told

  // Written with the port's lock, read also without it.
  std::atomic<size_t> ahead{0};     // written in frames, and not known to be consumed
  std::atomic<size_t> with_mpi{0};  // sends that are not complete
  std::atomic<size_t> straight{0};  // sends of user memory that are not complete

  // Note [Places].
  std::byte* place = nullptr;   // of the bytes that no receive is posted for
  size_t unposted = 0;          // how many those are
  std::deque<Awaited> awaited;  // in the order of the bytes
  std::deque<Piece> later;      // what came in frames after all those
  std::deque<Granted> granted;  // by the peer
  size_t promised = 0;          // by the peer: bytes that it will take so, besides

  bool ends = false;  // nothing of it is written or read any more
  bool cancelled = false;
  TimePoint ends_since{};

  bool is_expecting() const { return unposted > 0 || !awaited.empty(); }
};

}  // namespace farandole
