#include "transport/shm.h"

#include <algorithm>
#include <array>
#include <atomic>
#include <list>
#include <mutex>
#include <new>
#include <utility>

#include "base/byte_ring.h"

namespace farandole {
namespace {

// ---- what lies in the segment ----
//
//   block:  | BlockHeader | control of lane 0 | ring of lane 0 | control of lane 1 | …
//   ring:   frames, each a multiple of 8 bytes, so that a header word never wraps:
//             inline      | length << 1     | `length` bytes, padded to 8 |
//             reference   | length << 1 | 1 | offset in the segment       |

struct alignas(128) BlockHeader {
  uint64_t lanes;
  uint64_t ring_bytes;
};

constexpr size_t kLaneBytes = sizeof(RingControl) + kShmRingBytes;
constexpr size_t kWord = sizeof(uint64_t);

// One frame's copy at most: the reader starts on it while we copy the next.
constexpr size_t kLongestInline = 16 * 1024;
// Shorter runs are copied: a reference holds the writer's step until the reader has consumed it.
constexpr size_t kShortestReference = 4 * 1024;

constexpr size_t padded(size_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

size_t block_bytes(int lanes) {
  return sizeof(BlockHeader) + static_cast<size_t>(lanes) * kLaneBytes;
}

struct RingPlace {
  RingControl& control;
  std::span<std::byte> data;
};

RingPlace ring_of(std::byte* block, int lane) {
  std::byte* at = block + sizeof(BlockHeader) + static_cast<size_t>(lane) * kLaneBytes;
  // Zeroed memory is an empty ring, so neither side has to construct it before the other looks.
  return {*std::launder(reinterpret_cast<RingControl*>(at)),
          {at + sizeof(RingControl), kShmRingBytes}};
}

/// Directory key of what its publisher shares with `peer`; never 0 (splitmix64's finalizer).
uint64_t directory_key(uint64_t stream_key, int peer) {
  uint64_t x = stream_key + 0x9e3779b97f4a7c15 * (static_cast<uint64_t>(peer) + 1);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9;
  x = (x ^ (x >> 27)) * 0x94d049bb133111eb;
  x ^= x >> 31;
  return x == 0 ? 1 : x;
}

// ---- who owns a block, and until when ----

/// A block of ours that a peer reads.
struct Block {
  std::byte* data;
  int peer;
  uint64_t key;       // in our directory
  uint64_t peer_key;  // of the counterpart, in the peer's
  bool met = false;   // we have seen the counterpart
};

/// What a rank's transport and its channels share. A block is released only when the peer cannot
/// touch it any more; until then it waits in `retired_` and every later call looks again.
class Shared {
 public:
  Shared(std::shared_ptr<Arena> arena, int rank) : arena_(std::move(arena)), rank_(rank) {}

  Segment& segment() const { return *arena_->segment(); }
  int rank() const { return rank_; }

  Block open(int peer, uint64_t stream_key, int lanes) {
    sweep();
    const Block block{arena_->allocate(block_bytes(lanes)), peer, directory_key(stream_key, peer),
                      directory_key(stream_key, rank_)};
    new (block.data) BlockHeader{static_cast<uint64_t>(lanes), kShmRingBytes};
    try {
      segment().publish(rank_, block.key, static_cast<uint64_t>(block.data - segment().at(0)));
    } catch (...) {
      arena_->release(block.data);
      throw;
    }
    return block;
  }

  void retire(const Block& block) {
    segment().close(rank_, block.key);
    const std::lock_guard lock(mutex_);
    retired_.push_back(block);
    sweep_locked();
  }

  void sweep() {
    const std::lock_guard lock(mutex_);
    sweep_locked();
  }

 private:
  /// Our last bytes may still be unread in the rings, so a closed block stays until its reader has
  /// closed as well. A counterpart that we met and is no longer listed was closed and withdrawn;
  /// one that we never met may still come, and finds us, until its rank is gone.
  bool free_to_go(Block& block) const {
    block.met = block.met || segment().listed(block.peer, block.peer_key);
    if (block.met) return segment().closed(block.peer, block.peer_key);
    return segment().state_of(block.peer) == RankState::gone;
  }

  void sweep_locked() {
    std::erase_if(retired_, [this](Block& block) {
      if (!free_to_go(block)) return false;
      segment().withdraw(rank_, block.key);
      arena_->release(block.data);
      return true;
    });
  }

  std::shared_ptr<Arena> arena_;
  int rank_;
  std::mutex mutex_;  // guards retired_: groups may end on other threads than the one that polls
  std::list<Block> retired_;
};

/// The block of one connection, shared by its channels; retires with the last of them.
struct Link {
  Link(std::shared_ptr<Shared> whose, Block what) : shared(std::move(whose)), block(what) {}
  ~Link() { shared->retire(block); }
  Link(const Link&) = delete;
  Link& operator=(const Link&) = delete;

  std::shared_ptr<Shared> shared;
  Block block;
};

// ---- the channel ----

class ShmChannel : public Channel {
 public:
  ShmChannel(std::shared_ptr<Link> link, RingPlace out, RingPlace in)
      : link_(std::move(link)), writer_(out.control, out.data), reader_(in.control, in.data) {}

  size_t write(std::span<const std::byte> bytes) override {
    if (bytes.size() >= kShortestReference)
      if (const auto offset = segment().offset_of(bytes.data(), bytes.size()))
        return write_reference(bytes.size(), *offset);
    return write_inline(bytes);
  }

  bool drained() const override { return writer_.consumed_to(last_reference_end_); }

  std::span<const std::byte> peek(size_t at_least) override {
    if (!open_frame(front_)) return {};
    const std::span<const std::byte> run = bytes_of(front_);
    if (run.size() >= at_least) return run;
    return join(at_least);
  }

  void consume(size_t count) override {
    while (count > 0) {
      open_frame(front_);  // peek() saw these bytes, so the frame is there
      const size_t taken = std::min(count, front_.left);
      count -= taken;
      front_.left -= taken;
      front_.done += taken;
      if (front_.left == 0) {
        reader_.consume(front_.frame_bytes());
        front_ = {};
      }
    }
  }

 private:
  /// A place in the arriving stream: a frame and how far we are in it.
  struct Cursor {
    size_t skip = 0;  // of the frame, in ring bytes after the consumed ones
    size_t left = 0;  // stream bytes of the frame not taken yet; 0: no frame open
    size_t done = 0;  // stream bytes of the frame already taken
    const std::byte* reference = nullptr;  // null: inline

    size_t frame_bytes() const { return reference ? 2 * kWord : kWord + padded(left + done); }
  };

  Segment& segment() const { return link_->shared->segment(); }

  size_t write_inline(std::span<const std::byte> bytes) {
    const size_t want = std::min(bytes.size(), kLongestInline);
    const size_t room = writer_.room(kWord + padded(want));
    if (room < 2 * kWord || want == 0) return 0;
    // Whole words unless it is the end: frames then never split an element.
    const size_t count = std::min(want, room - kWord);
    const size_t length = count < bytes.size() ? count / kWord * kWord : count;
    put_word(length << 1);
    writer_.stage(bytes.first(length));
    writer_.stage(std::span(kPadding).first(padded(length) - length));
    writer_.publish();
    return length;
  }

  size_t write_reference(size_t length, uint64_t offset) {
    if (writer_.room(2 * kWord) < 2 * kWord) return 0;
    put_word(length << 1 | 1);
    put_word(offset);
    writer_.publish();
    last_reference_end_ = writer_.written();
    return length;
  }

  void put_word(uint64_t word) { writer_.stage(std::as_bytes(std::span(&word, 1))); }

  /// The word at `skip` if it has arrived. Loaded once: what was checked is what is used.
  bool word_at(size_t skip, uint64_t& word) {
    if (reader_.arrived(skip + kWord) < skip + kWord) return false;
    auto* at = const_cast<std::byte*>(reader_.view(skip).data());
    word = std::atomic_ref(*reinterpret_cast<uint64_t*>(at)).load(std::memory_order_relaxed);
    return true;
  }

  /// Makes sure that `cursor` stands in a frame with bytes left; false when none has arrived.
  bool open_frame(Cursor& cursor) {
    uint64_t header = 0;
    if (cursor.left > 0) return true;
    if (!word_at(cursor.skip, header)) return false;
    const uint64_t length = header >> 1;
    cursor.done = 0;
    cursor.reference = nullptr;
    if ((header & 1) != 0) {
      uint64_t offset = 0;
      if (!word_at(cursor.skip + kWord, offset)) corrupt();
      cursor.reference = referenced(offset, length);
    } else if (length > kLongestInline ||
               reader_.arrived(0) < cursor.skip + kWord + padded(length)) {
      corrupt();
    }
    if (length == 0) corrupt();
    cursor.left = length;
    return true;
  }

  /// Only the arenas may be referred to: a wild offset must not lead us anywhere else.
  const std::byte* referenced(uint64_t offset, uint64_t length) const {
    const Segment& shared = segment();
    const auto last = shared.arena(shared.ranks() - 1);
    const auto begin = static_cast<uint64_t>(shared.arena(0).data() - shared.at(0));
    const auto end = static_cast<uint64_t>(last.data() + last.size() - shared.at(0));
    if (offset < begin || offset > end || length > end - offset) corrupt();
    return shared.at(offset);
  }

  [[noreturn]] void corrupt() const {
    Context where;
    where.peer = link_->block.peer;
    throw Error(ErrorCode::resource, "shared memory control block corrupt", where,
                "some process wrote where it must not: look for stray pointers on this host");
  }

  /// The contiguous bytes at `cursor`, which stands in a frame.
  std::span<const std::byte> bytes_of(const Cursor& cursor) const {
    if (cursor.reference) return {cursor.reference + cursor.done, cursor.left};
    const auto run = reader_.view(cursor.skip + kWord + cursor.done);
    return run.first(std::min(run.size(), cursor.left));
  }

  /// Bytes that the wrap or the end of a frame splits, gathered in a buffer of ours.
  std::span<const std::byte> join(size_t at_least) {
    Cursor cursor = front_;
    size_t have = 0;
    while (have < at_least) {
      if (!open_frame(cursor)) return {};
      const auto run = bytes_of(cursor);
      const size_t taken = std::min(run.size(), at_least - have);
      std::memcpy(joined_.data() + have, run.data(), taken);
      have += taken;
      cursor.left -= taken;
      cursor.done += taken;
      if (cursor.left == 0) cursor.skip += cursor.frame_bytes();
    }
    return {joined_.data(), at_least};
  }

  static constexpr std::array<std::byte, kWord> kPadding{};

  std::shared_ptr<Link> link_;
  mutable RingWriter writer_;  // drained() refreshes its view of the reader
  RingReader reader_;
  uint64_t last_reference_end_ = 0;  // ring index: consumed to here, no reference is in use
  Cursor front_;
  std::array<std::byte, RingReader::kLongestElement> joined_{};
};

// ---- connecting ----

class ShmConnecting : public Connecting {
 public:
  ShmConnecting(std::shared_ptr<Link> link, int lanes) : link_(std::move(link)), lanes_(lanes) {}

  std::vector<std::unique_ptr<Channel>> poll(TimePoint) override {
    Shared& shared = *link_->shared;
    const auto offset = shared.segment().find(link_->block.peer, link_->block.peer_key);
    if (!offset) return {};
    std::byte* theirs = counterpart(shared.segment(), *offset);
    link_->block.met = true;
    std::vector<std::unique_ptr<Channel>> channels;
    for (int lane = 0; lane < lanes_; ++lane)
      channels.push_back(std::make_unique<ShmChannel>(link_, ring_of(link_->block.data, lane),
                                                      ring_of(theirs, lane)));
    return channels;
  }

 private:
  /// The peer's block, after checking that it lies in the peer's arena and fits ours.
  std::byte* counterpart(const Segment& segment, uint64_t offset) const {
    const std::span<std::byte> arena = segment.arena(link_->block.peer);
    const uint64_t begin = static_cast<uint64_t>(arena.data() - segment.at(0));
    const size_t bytes = block_bytes(lanes_);
    bool fits = offset % alignof(BlockHeader) == 0 && offset >= begin && bytes <= arena.size() &&
                offset - begin <= arena.size() - bytes;
    if (fits) {
      const auto* header = reinterpret_cast<const BlockHeader*>(segment.at(offset));
      fits = header->lanes == static_cast<uint64_t>(lanes_) && header->ring_bytes == kShmRingBytes;
    }
    if (!fits) {
      Context where;
      where.peer = link_->block.peer;
      throw Error(ErrorCode::link,
                  "rank " + std::to_string(link_->block.peer) +
                      " published a connection of another shape than ours",
                  where, "run the same version with the same settings on every rank");
    }
    return segment.at(offset);
  }

  std::shared_ptr<Link> link_;
  int lanes_;
};

class Shm : public Transport {
 public:
  Shm(std::shared_ptr<Arena> arena, int rank, std::string host)
      : shared_(std::make_shared<Shared>(std::move(arena), rank)), host_(std::move(host)) {}
  ~Shm() override { shared_->sweep(); }

  std::string_view name() const override { return "shm"; }
  bool reaches(const PeerInfo& peer) const override {
    return peer.host == host_ && peer.rank >= 0 && peer.rank < shared_->segment().ranks();
  }
  std::unique_ptr<Connecting> connect(const PeerInfo& peer, uint64_t stream_key,
                                      int lanes) override {
    auto link = std::make_shared<Link>(shared_, shared_->open(peer.rank, stream_key, lanes));
    return std::make_unique<ShmConnecting>(std::move(link), lanes);
  }

 private:
  std::shared_ptr<Shared> shared_;
  std::string host_;
};

}  // namespace

std::unique_ptr<Transport> shm_transport(std::shared_ptr<Arena> arena, int rank, std::string host) {
  return std::make_unique<Shm>(std::move(arena), rank, std::move(host));
}

}  // namespace farandole
