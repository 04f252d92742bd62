// A channel through shared memory: one lane of a connection, a ring of frames each way.
//
//   lane:   | RingControl | Offer | ring |     in the memory of the rank that writes to the ring
//   frame:  a multiple of 8 bytes, so that a header word never wraps
//             inlined     | length << 2     | `length` bytes, padded to 8 |
//             reference   | length << 2 | 1 | offset in the segment       |
//             delivered   | length << 2 | 2 |
//
// Long runs of bytes that lie in the arenas anyway travel as references: the reader folds straight
// out of the writer's memory. Or they are put: the reader has offered a place for them, and the
// writer has delivered them there.
#pragma once

#include <array>
#include <atomic>
#include <cstdint>
#include <memory>

#include "base/byte_ring.h"
#include "transport/channel.h"
#include "transport/segment.h"

namespace farandole {

/// Bytes that a ring holds. Sparse: an idle ring costs address space only. So long that its lines
/// have left the reader's caches when they are written again: an all-reduce of 4 MiB by `ring`, Zen
/// 4: with 128 KiB 590 us, 256: 350, 512: 320, 1 MiB: 330.
inline constexpr size_t kShmRingBytes = 512 * 1024;

/// From so many bytes on, the sender puts bytes that are only moved into their place, where ranks
/// exchange: they would write lines that their peer has just read (stream/stream_page.h). Where one
/// sends to many, the receivers copy side by side. An all-reduce of 1 MiB in memory that all ranks
/// map, Zen 4: by `ring` 66 -> 41 us, by `halving_doubling` 64 -> 40.
inline constexpr size_t kShortestPut = 32 * 1024;

/// Where the lane's owner wants the next bytes that it is sent.
struct alignas(128) Offer {
  std::atomic<uint64_t> begin{0};  // the first byte's index in the stream + 1; released last
  std::atomic<uint64_t> place{0};  // offset in the segment + 1; 0: they are not to be put
  std::atomic<uint64_t> count{0};
};

inline constexpr size_t kShmLaneBytes = sizeof(RingControl) + sizeof(Offer) + kShmRingBytes;

struct ShmLane {
  RingControl& control;
  Offer& offer;
  std::span<std::byte> ring;
};
/// Zeroed memory is an empty ring and no offer: neither side constructs it before the other looks.
ShmLane shm_lane_at(std::byte* memory);

class ShmChannel : public Channel {
 public:
  /// `link` keeps both lanes where they are.
  ShmChannel(std::shared_ptr<const void> link, Segment& segment, int peer, ShmLane mine,
             ShmLane theirs);

  size_t write(std::span<const std::byte> bytes) override;
  bool drained() override { return writer_.consumed_to(last_reference_end_); }
  std::span<const std::byte> peek(size_t at_least) override;
  void consume(size_t count) override;

  PlaceRule place_rule() const override {
    return {.shortest = kShortestPut, .by_visits = true, .of_exchanges = true};
  }
  void offer(std::byte* place, size_t count) override;
  std::optional<std::span<std::byte>> place_for(std::span<const std::byte> bytes) override;
  void delivered(size_t count) override;

 private:
  enum class Frame : uint64_t { inlined, reference, delivered };

  /// A place in the arriving stream: a frame and how far we are in it.
  struct Cursor {
    size_t skip = 0;     // of the frame, in ring bytes after the consumed ones
    uint64_t begin = 0;  // of the frame, in the stream
    size_t left = 0;     // stream bytes of the frame not taken yet; 0: no frame open
    size_t done = 0;     // stream bytes of the frame already taken
    Frame kind = Frame::inlined;
    const std::byte* elsewhere = nullptr;  // where its bytes begin; null: in the frame

    size_t frame_bytes() const;
  };

  /// An offer as one side keeps it: bytes [begin, end) of the stream go to `place`.
  struct Run {
    uint64_t begin = 0, end = 0;
    std::byte* place = nullptr;

    std::byte* at(uint64_t index) const { return place + (index - begin); }
  };

  size_t write_frame(std::span<const std::byte> bytes);
  size_t write_inline(std::span<const std::byte> bytes);
  size_t write_reference(size_t length, uint64_t offset);
  void put_header(size_t length, Frame kind);
  void put_word(uint64_t word) { writer_.put(std::as_bytes(std::span(&word, 1))); }
  bool take_offer();

  bool open_frame(Cursor& cursor);
  bool word_at(size_t skip, uint64_t& word);
  std::span<const std::byte> bytes_of(const Cursor& cursor) const;
  std::span<const std::byte> join(size_t at_least);

  const std::byte* referenced(uint64_t offset, uint64_t length) const;
  const std::byte* put_by_peer(uint64_t begin, uint64_t length) const;
  std::byte* in_arena_of_peer(uint64_t offset, uint64_t length) const;
  [[noreturn]] void corrupt() const;

  std::shared_ptr<const void> link_;
  Segment& segment_;
  int peer_;
  mutable RingWriter writer_;  // drained() refreshes its view of the reader
  RingReader reader_;
  Offer& offer_;
  const Offer& their_offer_;
  uint64_t sent_ = 0, received_ = 0;  // bytes of the two streams
  uint64_t last_reference_end_ = 0;   // ring index: consumed to here, no reference is in use
  Run taken_;                         // the peer's offer that we have come to
  Run offered_;                       // our newest
  Cursor front_;
  std::array<std::byte, RingReader::kLongestElement> joined_{};
};

}  // namespace farandole
