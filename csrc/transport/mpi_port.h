// What one rank has of MPI: to each other rank a link, over which go the bytes of all channels
// between the two, in frames. A frame is one message of MPI and says whose it is, so that no tags
// are to be agreed on, and frames of a channel that is not open here yet wait for it.
//
// Note [Ahead]
//
// A channel is at most kWindow bytes ahead of its consumer, who tells what it has consumed. So
// links take every frame at once, none stands in another's way, and what they hold is bounded. MPI
// moves bytes only while somebody calls it: an operation whose bytes are consumed but for kQuiet
// may end, since so few lie with MPI no more.
//
// Note [The end of MPI]
//
// Once a rank has died nothing of MPI is called any more, as it promises nothing then.
// MPI_Finalize, which waits for all ranks, would wait for the dead: it ends the process instead
// (at_finalize).
#pragma once

#include <atomic>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/mpi_functions.h"

namespace farandole {

/// One channel's bytes, both ways.
struct MpiPipe {
  /// What has arrived: [begin, end) of the bytes.
  struct Piece {
    std::unique_ptr<std::byte[]> bytes;
    size_t begin = 0, end = 0;
    bool whole = false;  // as long as any frame
    size_t size() const { return end - begin; }
  };

  using Key = std::pair<uint64_t, int>;  // of the stream; the lane

  int peer = -1;
  Key key;
  std::deque<Piece> arrived;
  size_t count = 0;     // bytes in it
  size_t ahead = 0;     // written, and not known to be consumed
  size_t with_mpi = 0;  // sends that are not complete
  size_t owed = 0;      // consumed, and not told
};

/// Any thread; links are polled by whoever polls the engine.
class MpiPort {
 public:
  static constexpr size_t kPiece = 64 * 1024;  // bytes in a frame, at most
  static constexpr size_t kWindow = 4 * kPiece;
  static constexpr size_t kQuiet = 4096;

  /// `world`: the same on all its ranks, and another for every world.
  MpiPort(std::unique_ptr<MpiFunctions> functions, int rank, int size, uint64_t world);
  ~MpiPort();
  MpiPort(const MpiPort&) = delete;
  MpiPort& operator=(const MpiPort&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }

  /// One end of a channel; the other rank opens the other.
  std::shared_ptr<MpiPipe> open(int peer, uint64_t stream, int lane);
  void shut(const MpiPipe& pipe);

  // ---- as Channel's: of no effect once MPI has ended, and later Error(link) ----
  size_t write(const std::shared_ptr<MpiPipe>& pipe, std::span<const std::byte> bytes);
  bool drained(const MpiPipe& pipe);
  std::span<const std::byte> peek(MpiPipe& pipe, size_t at_least);
  void consume(const std::shared_ptr<MpiPipe>& pipe, size_t count);

  /// Moves what can be moved, of all channels.
  void progress_all();
  /// Frames may come: MPI has to be asked for them.
  bool expects() const { return expects_.load(std::memory_order_relaxed); }

  /// From now on nothing of MPI is called, and MPI_Finalize will end the process.
  void abandon(const std::string& why);
  /// This rank leaves: waits a moment for what is on its way.
  void close();
  /// MPI_Finalize has begun, and this rank had not left.
  void finalize();

 private:
  enum class State { open, abandoned, finalized, closed };
  enum class Kind : uint32_t;
  struct Frame;
  struct Receive {
    std::unique_ptr<std::byte[]> bytes;
    MpiRequest request;
  };
  struct Send {
    std::unique_ptr<std::byte[]> bytes;
    MpiRequest request;
    std::shared_ptr<MpiPipe> of;
    bool whole = false;
  };
  struct Link {
    int peer = -1;
    std::deque<Receive> receives;  // messages of a rank are received in this order
    std::deque<Send> sends;
    std::map<MpiPipe::Key, std::shared_ptr<MpiPipe>> pipes;
    std::set<MpiPipe::Key> shut;  // whose frames are dropped
    std::deque<MpiPipe::Key> shut_in_order;
  };

  // With mutex_ held.
  bool usable();
  void lose(const std::string& why);
  template <typename Body>
  void guard(Body body);
  Link& link_to(int peer);
  std::shared_ptr<MpiPipe> pipe_of(Link& link, const MpiPipe::Key& key);
  void progress(Link& link);
  void post(Link& link);
  void take(Link& link, Receive& receive, size_t bytes);
  void send(Link& link, Kind kind, const std::shared_ptr<MpiPipe>& pipe, size_t count,
            std::span<const std::byte> bytes);
  void join(MpiPipe& pipe, size_t at_least);
  bool finish_sends();
  void end_receives();
  void keep_what_mpi_uses();
  std::unique_ptr<std::byte[]> whole_buffer();
  void give_back(std::unique_ptr<std::byte[]> buffer, bool whole);

  const std::unique_ptr<MpiFunctions> functions_;
  const int rank_, size_;
  const uint64_t world_;
  std::atomic<bool> expects_{false};

  std::mutex mutex_;  // guards what follows
  State state_ = State::open;
  std::string why_;  // it is not open
  TimePoint since_{};
  std::map<int, Link> links_;
  std::vector<std::unique_ptr<std::byte[]>> buffers_;  // whole ones that nobody uses
};

/// Of the process: from now on MPI_Finalize ends it, with exit code 1, if that is watched.
void abandon_mpi(const std::string& why);
/// Of the process: what MPI_Finalize begins with. `port` may have ended by then.
void watch_the_end_of_mpi(MpiFunctions& functions);
void watch_the_end_of_mpi(const std::shared_ptr<MpiPort>& port);

}  // namespace farandole
