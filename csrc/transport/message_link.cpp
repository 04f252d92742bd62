#include "transport/message_link.h"

#include <algorithm>
#include <cstring>
#include <utility>

namespace farandole {
namespace {

constexpr size_t kFirstRoom = 64 << 10;                        // of a message; most need no more
constexpr size_t kTrailer = sizeof(uint32_t) + Seals::kBytes;  // how much is sealed; the seal

}  // namespace

void MessageLink::send_frame(std::vector<std::byte> frame, size_t sealed) {
  if (frame.size() > kLargestMessage + sizeof length_)
    throw Error(ErrorCode::resource, "a message of " + std::to_string(frame.size()) +
                                         " bytes exceeds what ranks exchange");
  outgoing_.push_back({.bytes = std::move(frame), .sealed = sealed});
}

bool MessageLink::receive(std::vector<std::byte>& message) {
  if (arrived_.empty()) return false;
  message = std::move(arrived_.front());
  arrived_.pop_front();
  return true;
}

bool MessageLink::poll() {
  if (!channel_ && !connect()) return false;
  const bool wrote = write();
  return read() || wrote;
}

bool MessageLink::connect() {
  std::vector<std::unique_ptr<Channel>> channels = connecting_->poll(now());
  if (channels.empty()) return false;
  channel_ = std::move(channels.front());
  connecting_.reset();
  return true;
}

bool MessageLink::write() {
  bool moved = false;
  while (!outgoing_.empty()) {
    Outgoing& front = outgoing_.front();
    if (!front.is_ready && !make_ready(front)) break;
    if (front.written < front.bytes.size()) {
      const size_t taken = channel_->write(std::span(front.bytes).subspan(front.written));
      if (taken == 0) break;
      front.written += taken;
      moved = true;
      continue;
    }
    if (!channel_->drained()) break;  // the channel may still refer to these bytes
    outgoing_.pop_front();
  }
  return moved;
}

/// Seals are given in the order of sending. False: there is no key yet.
bool MessageLink::make_ready(Outgoing& message) {
  if (channel_->is_sealed()) {
    Seals* const seals = channel_->seals();
    if (seals == nullptr) return false;
    const auto body = std::span(message.bytes).subspan(sizeof length_);
    const auto sealed = static_cast<uint32_t>(std::min(message.sealed, body.size()));
    const Mark mark = seals->out.close(body.first(sealed), nullptr, sealed);
    const auto number = std::as_bytes(std::span(&sealed, 1));
    message.bytes.insert(message.bytes.end(), number.begin(), number.end());
    message.bytes.insert(message.bytes.end(), mark.begin(), mark.end());
  }
  return message.is_ready = true;
}

void MessageLink::open(std::vector<std::byte>& message) {
  if (!channel_->is_sealed()) return;
  const std::span<const std::byte> body(message.data(), message.size() - kTrailer);
  uint32_t sealed = 0;
  std::memcpy(&sealed, body.data() + body.size(), sizeof sealed);
  const auto mark = std::span(message).last<Seals::kBytes>();
  is_broken_ = is_broken_ || sealed > body.size() ||
               !channel_->seals()->in.opens(body.first(sealed), mark, nullptr, sealed);
  if (is_broken_) WireReader::malformed(kBrokenSeal);
  message.resize(body.size());
}

/// Reads at most one message, so that its reader does not ask the kernel for the next one. What is
/// malformed stays where it is, and is refused again: nothing behind it can be trusted.
bool MessageLink::read() {
  bool moved = false;
  if (length_read_ == 0 && channel_->peek(1).empty()) return false;  // fills a buffer at once
  while (length_read_ < sizeof length_) {
    auto bytes = std::as_writable_bytes(std::span(&length_, 1)).subspan(length_read_);
    const size_t count = channel_->read(bytes);
    if (count == 0) return moved;
    moved = true;
    length_read_ += count;
    body_read_ = 0;
  }
  if (length_ > kLargestMessage)
    WireReader::malformed("a message of " + std::to_string(length_) + " bytes");
  const size_t whole = length_ + (channel_->is_sealed() ? kTrailer : 0);
  while (body_read_ < whole) {
    // As much as has come, and as much again: a length alone takes no memory.
    if (body_read_ == body_.size())
      body_.resize(std::min<size_t>(whole, std::max(kFirstRoom, 2 * body_read_)));
    const size_t count = channel_->read(std::span(body_).subspan(body_read_));
    if (count == 0) return moved;
    moved = true;
    body_read_ += count;
  }
  open(body_);
  length_read_ = 0;
  arrived_.push_back(std::exchange(body_, {}));
  return true;
}

}  // namespace farandole
