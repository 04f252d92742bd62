#include "transport/shm_channel.h"

#include <algorithm>
#include <new>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kWord = sizeof(uint64_t);

// One frame's copy at most: the reader starts on it while we copy the next.
constexpr size_t kLongestInline = 16 * 1024;
// Shorter runs are copied: a reference holds the writer's step until the reader has consumed it.
constexpr size_t kShortestReference = 4 * 1024;

constexpr std::array<std::byte, kWord> kPadding{};
constexpr size_t padded(size_t bytes) { return (bytes + kWord - 1) / kWord * kWord; }

bool lies_in(uint64_t begin, uint64_t end, uint64_t offset, uint64_t length) {
  return offset >= begin && offset <= end && length <= end - offset;
}

}  // namespace

ShmLane shm_lane_at(std::byte* memory) {
  std::byte* const offer = memory + sizeof(RingControl);
  return {*std::launder(reinterpret_cast<RingControl*>(memory)),
          *std::launder(reinterpret_cast<Offer*>(offer)),
          {offer + sizeof(Offer), kShmRingBytes}};
}

ShmChannel::ShmChannel(std::shared_ptr<const void> link, Segment& segment, int peer, ShmLane mine,
                       ShmLane theirs)
    : link_(std::move(link)),
      segment_(segment),
      peer_(peer),
      writer_(mine.control, mine.ring),
      reader_(theirs.control, theirs.ring),
      offer_(mine.offer),
      their_offer_(theirs.offer) {}

// ---- sending ----

size_t ShmChannel::write(std::span<const std::byte> bytes) {
  const size_t count = write_frame(bytes);
  sent_ += count;
  return count;
}

size_t ShmChannel::write_frame(std::span<const std::byte> bytes) {
  if (bytes.size() >= kShortestReference)
    if (const auto offset = segment_.offset_of(bytes.data(), bytes.size()))
      return write_reference(bytes.size(), *offset);
  return write_inline(bytes);
}

size_t ShmChannel::write_inline(std::span<const std::byte> bytes) {
  const size_t want = std::min(bytes.size(), kLongestInline);
  const size_t room = writer_.room(kWord + padded(want));
  if (room < 2 * kWord || want == 0) return 0;
  // Whole words unless it is the end: frames then never split an element.
  const size_t count = std::min(want, room - kWord);
  const size_t length = count < bytes.size() ? count / kWord * kWord : count;
  put_header(length, Frame::inlined);
  writer_.put(bytes.first(length));
  writer_.put(std::span(kPadding).first(padded(length) - length));
  writer_.publish();
  return length;
}

size_t ShmChannel::write_reference(size_t length, uint64_t offset) {
  if (writer_.room(2 * kWord) < 2 * kWord) return 0;
  put_header(length, Frame::reference);
  put_word(offset);
  writer_.publish();
  last_reference_end_ = writer_.written();
  return length;
}

void ShmChannel::put_header(size_t length, Frame kind) {
  put_word(uint64_t{length} << 2 | static_cast<uint64_t>(kind));
}

std::optional<std::span<std::byte>> ShmChannel::place_for(std::span<const std::byte> bytes) {
  const std::span<std::byte> nowhere;
  // Bytes outside the arenas are copied into the ring, without waiting for the receiver.
  if (!segment_.offset_of(bytes.data(), bytes.size())) return nowhere;
  if (sent_ >= taken_.end && !take_offer()) return std::nullopt;
  if (taken_.place == nullptr) return nowhere;
  if (writer_.room(kWord) < kWord) return std::nullopt;
  const auto most = static_cast<size_t>(taken_.end - sent_);
  return std::span(taken_.at(sent_), std::min(bytes.size(), most));
}

/// Whether the peer has said where the bytes from `sent_` on shall lie. Its offer does not change
/// until it has read all of these.
bool ShmChannel::take_offer() {
  if (their_offer_.begin.load(std::memory_order_acquire) != sent_ + 1) return false;
  const uint64_t place = their_offer_.place.load(std::memory_order_relaxed);
  const uint64_t count = their_offer_.count.load(std::memory_order_relaxed);
  taken_ = {sent_, sent_ + count, place == 0 ? nullptr : in_arena_of_peer(place - 1, count)};
  return count > 0;
}

void ShmChannel::delivered(size_t count) {
  put_header(count, Frame::delivered);
  writer_.publish();  // release: the bytes stand there before the frame does
  sent_ += count;
}

// ---- receiving ----

void ShmChannel::offer(std::byte* place, size_t count) {
  const auto offset = place ? segment_.offset_of(place, count) : std::nullopt;
  offered_ = {received_, received_ + count, offset ? place : nullptr};
  offer_.place.store(offset ? *offset + 1 : 0, std::memory_order_relaxed);
  offer_.count.store(count, std::memory_order_relaxed);
  // Release: earlier uses of the memory are over; partner: take_offer.
  offer_.begin.store(received_ + 1, std::memory_order_release);
}

std::span<const std::byte> ShmChannel::peek(size_t at_least) {
  if (!open_frame(front_)) return {};
  const std::span<const std::byte> run = bytes_of(front_);
  if (run.size() >= at_least) return run;
  return join(at_least);
}

void ShmChannel::consume(size_t count) {
  while (count > 0) {
    open_frame(front_);  // peek() saw these bytes, so the frame is there
    const size_t taken = std::min(count, front_.left);
    count -= taken;
    received_ += taken;
    front_.left -= taken;
    front_.done += taken;
    if (front_.left == 0) {
      reader_.consume(front_.frame_bytes());
      front_ = {.begin = received_};
    }
  }
}

size_t ShmChannel::Cursor::frame_bytes() const {
  if (kind == Frame::inlined) return kWord + padded(left + done);
  return kind == Frame::reference ? 2 * kWord : kWord;
}

/// Makes sure that `cursor` stands in a frame with bytes left; false when none has arrived.
bool ShmChannel::open_frame(Cursor& cursor) {
  uint64_t header = 0;
  if (cursor.left > 0) return true;
  if (!word_at(cursor.skip, header)) return false;
  const uint64_t length = header >> 2;
  uint64_t offset = 0;
  cursor.done = 0;
  cursor.kind = static_cast<Frame>(header & 3);
  cursor.elsewhere = nullptr;
  switch (cursor.kind) {
    case Frame::inlined:
      if (length > kLongestInline || reader_.arrived(0) < cursor.skip + kWord + padded(length))
        corrupt();
      break;
    case Frame::reference:
      if (!word_at(cursor.skip + kWord, offset)) corrupt();
      cursor.elsewhere = referenced(offset, length);
      break;
    case Frame::delivered:
      cursor.elsewhere = put_by_peer(cursor.begin, length);
      break;
    default:
      corrupt();
  }
  if (length == 0) corrupt();
  cursor.left = length;
  return true;
}

/// The word at `skip` if it has arrived. Loaded once: what was checked is what is used.
bool ShmChannel::word_at(size_t skip, uint64_t& word) {
  if (reader_.arrived(skip + kWord) < skip + kWord) return false;
  auto* at = const_cast<std::byte*>(reader_.view(skip).data());
  word = std::atomic_ref(*reinterpret_cast<uint64_t*>(at)).load(std::memory_order_relaxed);
  return true;
}

/// The contiguous bytes at `cursor`, which stands in a frame.
std::span<const std::byte> ShmChannel::bytes_of(const Cursor& cursor) const {
  if (cursor.elsewhere) return {cursor.elsewhere + cursor.done, cursor.left};
  const auto run = reader_.view(cursor.skip + kWord + cursor.done);
  return run.first(std::min(run.size(), cursor.left));
}

/// Bytes that the wrap or the end of a frame splits, gathered in a buffer of ours.
std::span<const std::byte> ShmChannel::join(size_t at_least) {
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
    if (cursor.left > 0) continue;
    cursor.skip += cursor.frame_bytes();
    cursor.begin += cursor.done;
  }
  return {joined_.data(), at_least};
}

// ---- memory to which a peer's numbers may lead us ----

/// Only the arenas may be referred to: a wild offset must not lead us anywhere else.
const std::byte* ShmChannel::referenced(uint64_t offset, uint64_t length) const {
  if (!segment_.has(offset, length)) corrupt();
  return segment_.at(offset, length);
}

/// Where `length` bytes of the stream from `begin` on stand, by our own offer.
const std::byte* ShmChannel::put_by_peer(uint64_t begin, uint64_t length) const {
  if (offered_.place == nullptr || !lies_in(offered_.begin, offered_.end, begin, length)) corrupt();
  return offered_.at(begin);
}

/// A peer may ask us to write into its own arena alone.
std::byte* ShmChannel::in_arena_of_peer(uint64_t offset, uint64_t length) const {
  const std::span<std::byte> arena = segment_.arena(peer_);
  const uint64_t begin = *segment_.offset_of(arena.data(), arena.size());
  if (!lies_in(begin, begin + arena.size(), offset, length)) corrupt();
  return segment_.at(offset, length);
}

void ShmChannel::corrupt() const {
  Context where;
  where.peer = peer_;
  throw Error(ErrorCode::resource, "shared memory control block corrupt", where,
              "some process wrote where it must not: look for stray pointers on this host");
}

}  // namespace farandole
