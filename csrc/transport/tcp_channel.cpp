#include "transport/tcp_channel.h"

#include <sys/epoll.h>
#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/wire.h"

namespace farandole {

TcpChannel::~TcpChannel() {
  if (!link_.socket) return;
  shared_->door->links().remove(link_.socket.get());
  shared_->wakes.remove(link_);
}

/// Asks for the connection when it is first wanted; the lower rank dials.
bool TcpChannel::connected() {
  if (link_.socket) return true;
  if (!arrival_) arrival_ = shared_->door->await(lane_);
  if (!arrival_->here.load(std::memory_order_acquire)) return false;  // partner: TcpDoor::arrived
  if (arrival_->error) throw Error(*arrival_->error);
  const ConnectionKeys& keys = arrival_->connection.keys;
  if (is_in_records())
    records_.emplace(keys, shared_->wire == Wire::sealed);
  else
    seals_.emplace(keys);
  link_.socket = std::move(arrival_->connection.socket);
  arrival_.reset();
  shared_->door->links().add(link_.socket.get(), peer_);
  shared_->wakes.add(link_);
  return true;
}

size_t TcpChannel::write(std::span<const std::byte> bytes) {
  if (bytes.empty() || !connected()) return 0;
  if (error_ != 0) {
    complain();
    return 0;
  }
  return records_ ? write_records(bytes) : send(bytes);
}

size_t TcpChannel::send(std::span<const std::byte> bytes) {
  const ssize_t taken = ::send(link_.socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
  if (taken < 0 && errno != EAGAIN && errno != EINTR) {
    lose(errno);
    return 0;
  }
  const size_t count = taken < 0 ? 0 : static_cast<size_t>(taken);
  if (count < bytes.size())
    link_.wants |= EPOLLOUT;
  else
    link_.wants &= ~static_cast<uint32_t>(EPOLLOUT);
  return count;
}

size_t TcpChannel::write_records(std::span<const std::byte> bytes) {
  size_t taken = 0;
  while (flush() && taken < bytes.size()) taken += records_->put(bytes.subspan(taken));
  return taken;
}

/// True when the kernel has all bytes that were taken.
bool TcpChannel::flush() {
  while (!records_->to_send().empty() && error_ == 0) {
    const size_t count = send(records_->to_send());
    if (count == 0) return false;
    records_->sent(count);
  }
  return error_ == 0;
}

/// Without records, the kernel has all bytes that were taken; a record may still have to be sent.
bool TcpChannel::drained() {
  if (!records_ || flush()) return true;
  if (error_ != 0) complain();
  return false;
}

std::span<const std::byte> TcpChannel::peek(size_t at_least) {
  if (!buffer_) buffer_ = std::make_unique_for_overwrite<std::byte[]>(kBufferBytes);
  while (buffered().size() < at_least) {
    // The few bytes of an element that has not arrived whole.
    std::memmove(buffer_.get(), buffer_.get() + begin_, end_ - begin_);
    end_ -= begin_;
    begin_ = 0;
    const std::span<std::byte> room(buffer_.get() + end_, kBufferBytes - end_);
    const size_t count = is_in_records() ? receive_record(room) : receive(room);
    if (count == 0) return {};
    end_ += count;
  }
  return buffered();
}

size_t TcpChannel::read(std::span<std::byte> into) {
  const bool is_roomy = !is_in_records() || into.size() >= TcpRecords::kMost;
  if (begin_ == end_ && is_roomy) return is_in_records() ? receive_record(into) : receive(into);
  if (begin_ == end_ && (into.empty() || peek(1).empty())) return 0;
  const size_t count = std::min(into.size(), end_ - begin_);
  copy_bytes(into.data(), buffer_.get() + begin_, count);
  begin_ += count;
  return count;
}

/// Bytes that arrived before the end are always taken first: the kernel keeps that order.
size_t TcpChannel::receive(std::span<std::byte> into) {
  if (into.empty() || !connected()) return 0;
  ssize_t count = 0;
  if (!ended_) count = ::recv(link_.socket.get(), into.data(), into.size(), 0);
  if (count < 0 && (errno == EAGAIN || errno == EINTR)) {
    link_.wants |= EPOLLIN;
    return 0;
  }
  link_.wants &= ~static_cast<uint32_t>(EPOLLIN);
  if (count > 0) return static_cast<size_t>(count);
  ended_ = true;
  if (count < 0) lose(errno);
  if (error_ != 0) complain();
  return 0;
}

/// `into` has room for any.
size_t TcpChannel::receive_record(std::span<std::byte> into) {
  if (!connected()) return 0;
  try {
    while (records_->next() == 0) {
      const size_t count = receive(records_->room());
      if (count == 0) return 0;
      records_->arrived(count);
    }
    const size_t bytes = records_->next();
    records_->take(into.data());
    return bytes;
  } catch (const Malformed& error) {
    refuse(error.why());
  }
}

void TcpChannel::lose(int error) {
  error_ = error;
  broken_since_ = explained_ = now();
  link_.wants &= ~static_cast<uint32_t>(EPOLLOUT);
}

void TcpChannel::complain() {
  if (now() - explained_ < kPatience) return;
  explained_ = now();
  if (shared_->may_have_gone && shared_->may_have_gone(peer_, broken_since_)) return;
  Context where;
  where.peer = peer_;
  where.lane = lane_.lane;
  where.evidence = std::string("the kernel says: ") + std::strerror(error_);
  throw Error(ErrorCode::link,
              "the TCP connection between ranks " + std::to_string(lane_.dialer) + " and " +
                  std::to_string(lane_.listener) + " is broken",
              where);
}

void TcpChannel::refuse(const std::string& why) const {
  Context where;
  where.rank = where.peer = peer_;
  where.lane = lane_.lane;
  throw Error(ErrorCode::link, "data from rank " + std::to_string(peer_) + " are malformed: " + why,
              where, Malformed::kAdvice);
}

}  // namespace farandole
