// One rank's use of MPI: a link to each other rank carries the bytes of all channels between the
// two, in frames. A frame is one message of MPI and names its channel, so ranks need not agree on
// tags. Frames of a channel that is not open here yet wait for it.
//
// Note [Ahead]
//
// A channel is at most kWindow bytes of frames ahead of its consumer, which reports the bytes that
// it has consumed. So links take every frame at once, none stands in another's way, and the bytes
// they hold are bounded. MPI moves bytes only while it is called: an operation may end once all its
// bytes but kQuiet are consumed, since so few do not stay with MPI.
//
// A head is sealed (base/seal.h), by a key of the link and the direction; data are not. Messages
// that a channel carries have seals of their own.
//
// Note [Places]
//
// Long transfers go in no frames. The receiver, who knows where the bytes shall lie, posts receives
// there, or into buffers that are folded while they are hot, each with a tag of its own; a frame
// tells the sender each tag and how many bytes it takes, and the sender gives MPI its user's
// memory. So nothing is sent before there is a place for it, however long MPI's messages are, and
// all that MPI refers to belongs to an operation that both ranks have begun.
//
// Each tag that was told gets its bytes, or an empty message from a sender whose operation has
// failed: so receives end without being cancelled. Where no answer comes they are, and their tags
// are never used again: what comes for them late may not lie in another operation's memory.
//
// Note [Reductions]
//
// MPI's own all-reduce (MPI_Iallreduce, polled) of ranks that have agreed on the operation. MPI
// wants such calls in one order on all ranks of a communicator, which one stream of operations has;
// each has a duplicate of its own (MpiReduction::communicator). Those are made when the first of
// them is wanted, with all before it, in the order of their numbers: so also in one order on all
// ranks. They stay for later worlds of the same communicator (MpiDuplicates).
//
// MPI cannot cancel an all-reduce: it ends when every rank has begun it. If a world fails in
// between, a rank that has begun tells others. A rank that has not begins it with memory of the
// port's, whose result nobody reads. A rank that is told nothing for a moment has nothing to begin.
//
// Note [The end of MPI]
//
// Once a rank has died nothing of MPI is called any more, as it promises nothing then.
// MPI_Finalize, which waits for all ranks, would wait for the dead: it ends the process instead
// (transport/mpi_end.h).
#pragma once

#include <atomic>
#include <deque>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <span>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "base/seal.h"
#include "transport/channel.h"
#include "transport/mpi_functions.h"
#include "transport/mpi_pipe.h"
#include "transport/mpi_reduction.h"

namespace farandole {

struct MpiFrame;
enum class MpiFrameKind : uint32_t;

/// The link to one other rank: its channels, and its messages that MPI holds.
struct MpiLink {
  struct Receive {
    MpiPipe::Buffer bytes;
    MpiRequest request;
  };
  struct Send {
    MpiPipe::Buffer bytes;
    MpiRequest request;
    std::shared_ptr<MpiPipe> of;
    bool whole = false;
  };
  /// A send from memory of a channel's user; `of` is null for an empty message.
  struct Straight {
    MpiRequest request;
    std::shared_ptr<MpiPipe> of;
  };

  MpiLink(int other, const ConnectionKeys& keys) : peer(other), seals(keys) {}

  const int peer;
  Seals seals;
  std::deque<Receive> receives;  // messages of a rank are received in this order
  std::deque<Send> sends;
  std::vector<Straight> straight;
  std::map<MpiPipe::Key, std::shared_ptr<MpiPipe>> pipes;
  std::vector<std::shared_ptr<MpiPipe>> ending;  // shut, and still awaiting
  std::set<MpiPipe::Key> shut;                   // whose frames are dropped
  std::deque<MpiPipe::Key> shut_in_order;
  int next_tag = 0;
};

/// The threads that may call MPI, as it was initialized: any; any, one at a time; the port's maker.
enum class MpiThreads { multiple, serialized, funneled };

/// Used by any thread that may call MPI; the thread that polls the engine polls the links.
class MpiPort {
 public:
  static constexpr size_t kPiece = 64 * 1024;  // bytes in a frame, at most
  static constexpr size_t kWindow = 4 * kPiece;
  static constexpr size_t kQuiet = 4096;
  static constexpr size_t kShortestPlaced = 32 * 1024;  // of transfers that go in no frames
  static constexpr size_t kFolded = 512 * 1024;       // of such a one that is to be folded: a piece
  static constexpr size_t kPlaced = 2 * 1024 * 1024;  // of one that goes to its place
  /// How long MPI may hold memory if a rank does not answer: on busy machines an answer takes long.
  static constexpr auto kLongestHold = std::chrono::seconds(3);

  /// `world`: the same on all its ranks, and another for every world. `secret`: the job's.
  /// `duplicates`: those of the communicator.
  MpiPort(std::unique_ptr<MpiFunctions> functions, int rank, int size, uint64_t world,
          const Key& secret, MpiThreads threads = MpiThreads::multiple,
          std::shared_ptr<MpiDuplicates> duplicates = std::make_shared<MpiDuplicates>());
  ~MpiPort();
  MpiPort(const MpiPort&) = delete;
  MpiPort& operator=(const MpiPort&) = delete;

  int rank() const { return rank_; }
  int size() const { return size_; }
  MpiThreads threads() const { return threads_; }
  /// Funneled: the thread that made this.
  std::thread::id caller() const { return caller_; }

  /// Keys for messages between these two ranks, in this world and for this purpose alone.
  ConnectionKeys keys_for(int peer, const std::string& purpose) const;
  /// One end of a channel; the other rank opens the other.
  std::shared_ptr<MpiPipe> open(int peer, uint64_t stream, int lane);
  void shut(const std::shared_ptr<MpiPipe>& pipe);

  // ---- as Channel's: of no effect once MPI has ended, and later Error(link) ----
  size_t write(const std::shared_ptr<MpiPipe>& pipe, std::span<const std::byte> bytes);
  bool drained(const MpiPipe& pipe);
  std::span<const std::byte> peek(const std::shared_ptr<MpiPipe>& pipe, size_t at_least);
  void consume(const std::shared_ptr<MpiPipe>& pipe, size_t count);
  bool refers(const MpiPipe& pipe);
  void offer(const std::shared_ptr<MpiPipe>& pipe, std::byte* place, size_t count);
  /// Whether a transfer that is offered a place may be written now; `ready`: bytes to be written.
  bool takes(const MpiPipe& pipe, size_t ready);
  /// Never throws.
  Held let_go(const std::shared_ptr<MpiPipe>& pipe);

  // ---- MPI's own all-reduce: Note [Reductions] ----

  static constexpr size_t kCommunicators = 64;        // at most: MPIs have 2000, for all libraries
  static constexpr size_t kMostReduced = 0x7fffffff;  // elements: MPI counts in an int

  /// Whether MPI folds these.
  bool folds(DType dtype, ReduceOp op) const { return functions_->folds(dtype, op); }
  /// Begins it, if it has not begun. True when the output is there. Later Error(link).
  bool reduce(MpiReduction& reduction);
  /// Lets go of a reduction that nobody waits for any more. Never throws.
  Held let_go(MpiReduction& reduction);

  /// Moves as many bytes as it can, of all channels.
  void progress_all();
  /// Whether frames may come, so that MPI must be polled for them.
  bool expects() const { return expects_.load(std::memory_order_relaxed); }

  /// From now on nothing of MPI is called, and MPI_Finalize will end the process.
  void abandon(const std::string& why);
  /// This rank leaves: waits a moment for messages that are on their way.
  void close();
  /// MPI_Finalize has begun. If this rank had not left, `tell` is called to inform the others.
  void finalize();
  void when_finalized(std::function<void()> tell);

 private:
  enum class State { open, abandoned, finalized, closed };

  // With mutex_ held.
  bool may_call() const;
  bool usable();
  void lose(const std::string& why);
  template <typename Body>
  void guard(Body body);
  MpiLink& link_to(int peer);
  std::shared_ptr<MpiPipe> pipe_of(MpiLink& link, const MpiPipe::Key& key);
  void progress(MpiLink& link, const MpiPipe* until = nullptr, size_t at_least = 1);
  void post(MpiLink& link);
  void take(MpiLink& link, MpiLink::Receive& receive, size_t bytes);
  void keep(MpiPipe& pipe, MpiPipe::Piece piece);
  void send(MpiLink& link, const MpiFrame& frame, const std::shared_ptr<MpiPipe>& pipe,
            std::span<const std::byte> bytes);
  MpiFrame frame_of(const MpiPipe& pipe, MpiFrameKind kind, size_t count) const;
  void join(MpiPipe& pipe, size_t at_least);
  bool finish_sends();
  void end_receives();
  void keep_what_mpi_uses();

  // Note [Places].
  void await(const std::shared_ptr<MpiPipe>& pipe);
  void collect(const std::shared_ptr<MpiPipe>& pipe);
  bool receive_rest(MpiLink& link, MpiPipe::Awaited& awaited, bool ends);
  void end_awaited(MpiLink& link, MpiPipe& pipe);
  void cancel_awaited(MpiPipe& pipe);
  void answer(MpiLink& link, int tag);
  void answer_all(MpiLink& link, MpiPipe& pipe);
  size_t send_straight(const std::shared_ptr<MpiPipe>& pipe, std::span<const std::byte> bytes);
  void finish_straight(MpiLink& link);
  int new_tag(MpiLink& link);

  // Note [Reductions].
  bool has_communicator(size_t number);
  void begin(MpiReduction& reduction);
  void tell_begun(const MpiReduction& reduction);
  void join(const MpiFrame& told, int from);
  void progress_joined();
  bool ends(MpiReduction& reduction);

  MpiPipe::Buffer buffer(bool whole);
  void give_back(MpiPipe::Buffer buffer, bool whole);
  static size_t bytes_of_buffer(bool whole);

  const std::unique_ptr<MpiFunctions> functions_;
  const int rank_, size_;
  const uint64_t world_;
  const Key secret_;
  const MpiThreads threads_;
  const std::thread::id caller_ = std::this_thread::get_id();
  std::atomic<bool> expects_{false};

  std::mutex mutex_;  // guards what follows
  State state_ = State::open;
  std::string why_;  // it is not open
  TimePoint since_{};
  std::function<void()> when_finalized_;
  std::map<int, MpiLink> links_;
  const std::shared_ptr<MpiDuplicates> duplicates_;
  std::vector<std::unique_ptr<MpiJoined>> joined_;
  bool reductions_end_ = false;              // the world has failed: no more of them begin
  std::vector<MpiPipe::Buffer> buffers_[2];  // small and whole ones that nobody uses
};

}  // namespace farandole
