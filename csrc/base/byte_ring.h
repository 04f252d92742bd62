// A single-producer single-consumer byte ring over memory it does not own: the heap, or a block
// that another process maps and may have overwritten.
//
//            consumed                written
//   data:  …free…|■■■■■■ arrived ■■■■■|…free…          both only grow; the place is index mod
//   capacity
//
// Invariant: 0 <= written - consumed <= capacity. Each end keeps its own index to itself and only
// publishes it, so a peer that scribbles over the control words can stop an end, not misguide it.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <span>

#include "base/copy.h"
#include "base/error.h"

namespace farandole {

/// The shared part. Each word has a pair of cache lines to itself: neighbours are prefetched
/// together, and the two words are written by different cores. All zero is an empty ring.
struct RingControl {
  alignas(128) std::atomic<uint64_t> written{0};
  alignas(128) std::atomic<uint64_t> consumed{0};
};
static_assert(std::atomic<uint64_t>::is_always_lock_free && sizeof(RingControl) == 256);

/// `index` as the other end published it; throws unless it lies between two that we know: an index
/// never goes back, and never beyond what the invariant allows.
inline uint64_t valid_index(uint64_t index, uint64_t lowest, uint64_t highest) {
  if (index - lowest > highest - lowest)  // modulo 2^64, so wrapping around is no special case
    throw Error(ErrorCode::resource, "shared memory control block corrupt", {},
                "some process wrote where it must not: look for stray pointers on this host");
  return index;
}

/// The end that writes. `data` has a power of two of bytes and outlives this.
class RingWriter {
 public:
  RingWriter(RingControl& control, std::span<std::byte> data) : control_(&control), data_(data) {}

  /// Free bytes. Asks the other end only when the answer known so far is below `wanted`: its word
  /// is a cache line that the other core keeps taking away.
  size_t room(size_t wanted) {
    if (data_.size() - (written_ - consumed_) < wanted) look();
    return data_.size() - static_cast<size_t>(written_ - consumed_);
  }

  /// Copies bytes behind the last ones without showing them to the reader; needs the room.
  void put(std::span<const std::byte> bytes) {
    if (bytes.empty()) return;
    const size_t at = static_cast<size_t>(written_) & (data_.size() - 1);
    const size_t first = bytes.size() < data_.size() - at ? bytes.size() : data_.size() - at;
    copy_bytes(data_.data() + at, bytes.data(), first);
    copy_bytes(data_.data(), bytes.data() + first, bytes.size() - first);
    written_ += bytes.size();
  }

  /// Shows everything that was put. Release: the bytes come before the index; partner:
  /// RingReader::look.
  void publish() { control_->written.store(written_, std::memory_order_release); }

  /// Copies and shows the prefix there is room for.
  size_t write(std::span<const std::byte> bytes) {
    const size_t free = room(bytes.size());
    const size_t count = bytes.size() < free ? bytes.size() : free;
    if (count == 0) return 0;
    put(bytes.first(count));
    publish();
    return count;
  }

  uint64_t written() const { return written_; }

  /// True once the reader has consumed everything before `index`.
  bool consumed_to(uint64_t index) {
    if (consumed_ < index) look();
    return consumed_ >= index;
  }

 private:
  void look() {
    // Acquire: the reader is done with the bytes before we overwrite them or say so to the owner of
    // referenced memory; partner: RingReader::consume.
    const uint64_t theirs = control_->consumed.load(std::memory_order_acquire);
    consumed_ = valid_index(theirs, consumed_, written_);
  }

  RingControl* control_;
  std::span<std::byte> data_;
  uint64_t written_ = 0;
  uint64_t consumed_ = 0;  // as last seen: never more than the truth
};

/// The end that reads. `data` has a power of two of bytes and outlives this.
class RingReader {
 public:
  /// The most that peek() can be asked to make contiguous.
  static constexpr size_t kLongestElement = 16;

  RingReader(RingControl& control, std::span<const std::byte> data)
      : control_(&control), data_(data) {}

  /// Arrived bytes; asks the other end only when the answer known so far is below `wanted`.
  size_t arrived(size_t wanted) {
    if (written_ - consumed_ < wanted) look();
    return static_cast<size_t>(written_ - consumed_);
  }

  /// The contiguous ones among the bytes known to have arrived, after the first `skip` of them.
  std::span<const std::byte> view(size_t skip) const {
    const size_t known = static_cast<size_t>(written_ - consumed_);
    if (skip >= known) return {};
    const size_t at = static_cast<size_t>(consumed_ + skip) & (data_.size() - 1);
    const size_t count = known - skip;
    return data_.subspan(at, count < data_.size() - at ? count : data_.size() - at);
  }

  /// Arrived bytes; empty unless `at_least` are there. Where the end of the memory splits them,
  /// they are joined in a buffer of this object. Valid until the next call.
  std::span<const std::byte> peek(size_t at_least) {
    if (arrived(at_least) < at_least) return {};
    const std::span<const std::byte> first = view(0);
    if (first.size() >= at_least) return first;
    std::memcpy(joined_, first.data(), first.size());
    std::memcpy(joined_ + first.size(), data_.data(), at_least - first.size());
    return {joined_, at_least};
  }

  /// Gives the room of the first `count` arrived bytes back. Release: our reads come before the
  /// index; partner: RingWriter::look.
  void consume(size_t count) {
    if (count == 0) return;
    consumed_ += count;
    control_->consumed.store(consumed_, std::memory_order_release);
  }

 private:
  void look() {
    // Acquire: the bytes are there when the index is; partner: RingWriter::publish.
    const uint64_t theirs = control_->written.load(std::memory_order_acquire);
    written_ = valid_index(theirs, written_, consumed_ + data_.size());
  }

  RingControl* control_;
  std::span<const std::byte> data_;
  uint64_t written_ = 0;  // as last seen: never more than the truth
  uint64_t consumed_ = 0;
  std::byte joined_[kLongestElement];
};

}  // namespace farandole
