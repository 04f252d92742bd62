#include "transport/shm.h"

#include <list>
#include <mutex>
#include <new>
#include <utility>

#include "transport/shm_channel.h"

namespace farandole {
namespace {

// ---- what lies in the segment ----
//
//   block:  | BlockHeader | lane 0 | lane 1 | …              (a lane: transport/shm_channel.h)

struct alignas(128) BlockHeader {
  uint64_t lanes;
  uint64_t ring_bytes;
};

size_t block_bytes(int lanes) {
  return sizeof(BlockHeader) + static_cast<size_t>(lanes) * kShmLaneBytes;
}

ShmLane lane_of(std::byte* block, int lane) {
  return shm_lane_at(block + sizeof(BlockHeader) + static_cast<size_t>(lane) * kShmLaneBytes);
}

/// Directory key of its publisher's block for `peer`; never 0 (splitmix64's finalizer).
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

/// State shared by a rank's transport and its channels. A block is released only when the peer
/// cannot touch it any more; until then it waits in `retired_` and every later call looks again.
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
      segment().publish(rank_, block.key, *segment().offset_of(block.data, 1));
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
      channels.push_back(std::make_unique<ShmChannel>(link_, shared.segment(), link_->block.peer,
                                                      lane_of(link_->block.data, lane),
                                                      lane_of(theirs, lane)));
    return channels;
  }

 private:
  /// The peer's block, after checking that it lies in the peer's arena and fits ours.
  std::byte* counterpart(const Segment& segment, uint64_t offset) const {
    const std::span<std::byte> arena = segment.arena(link_->block.peer);
    const uint64_t begin = *segment.offset_of(arena.data(), arena.size());
    const size_t bytes = block_bytes(lanes_);
    bool fits = offset % alignof(BlockHeader) == 0 && offset >= begin && bytes <= arena.size() &&
                offset - begin <= arena.size() - bytes;
    if (fits) {
      const auto* header = reinterpret_cast<const BlockHeader*>(segment.at(offset, bytes));
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
    return segment.at(offset, bytes);
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
