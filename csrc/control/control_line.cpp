#include "control/control_line.h"

#include <sys/socket.h>

#include <cerrno>
#include <cstring>
#include <string>
#include <utility>

namespace farandole {

void ControlLine::open(TcpConnection connection, bool hides) {
  socket_ = std::move(connection.socket);
  seals_.emplace(connection.keys, hides);
  resumed_ = false;
  outgoing_.clear();
  sent_ = 0;
  error_ = 0;
  forget();
  put(frame_of<ResumeMessage>(taken_).take_frame());
}

void ControlLine::close(bool abort) {
  const linger at_once{.l_onoff = 1, .l_linger = 0};
  if (abort) ::setsockopt(socket_.get(), SOL_SOCKET, SO_LINGER, &at_once, sizeof at_once);
  socket_.reset();
  resumed_ = false;
  outgoing_.clear();
}

bool ControlLine::counts(std::byte tag) {
  switch (static_cast<ControlFrame>(tag)) {
    case ControlFrame::beat:
    case ControlFrame::ping:
    case ControlFrame::pong:
    case ControlFrame::resume:
      return false;
    default:
      return true;
  }
}

void ControlLine::send(FrameWriter frame) {
  std::vector<std::byte> bytes = frame.take_frame();
  if (keeps_ && counts(bytes[sizeof(uint32_t)])) {
    kept_.push_back(bytes);
    ++numbered_;
  }
  if (resumed_) put(std::move(bytes));
}

void ControlLine::put(std::vector<std::byte> frame) {
  seals_->out.close(outgoing_.emplace_back(std::move(frame)));
}

bool ControlLine::flush() {
  while (!outgoing_.empty()) {
    const std::vector<std::byte>& front = outgoing_.front();
    const ssize_t count = ::send(socket_.get(), front.data() + sent_, front.size() - sent_,
                                 MSG_NOSIGNAL | MSG_DONTWAIT);
    if (count < 0 && (errno == EAGAIN || errno == EINTR)) return true;  // the next beat tries again
    if (count < 0) {
      error_ = errno;
      return false;
    }
    sent_ += static_cast<size_t>(count);
    if (sent_ < front.size()) continue;
    outgoing_.pop_front();
    sent_ = 0;
  }
  return true;
}

void ControlLine::acknowledge(uint64_t taken) {
  if (taken > numbered_ || taken < numbered_ - kept_.size())
    WireReader::malformed("that " + std::to_string(taken) + " control messages have come");
  while (numbered_ - kept_.size() < taken) kept_.pop_front();
}

void ControlLine::resume(uint64_t taken) {
  acknowledge(taken);
  if (std::exchange(resumed_, true)) WireReader::malformed("a second beginning of a connection");
  for (const std::vector<std::byte>& frame : kept_) put(frame);
}

ssize_t ControlLine::receive() {
  std::byte chunk[4096];
  const ssize_t count = ::recv(socket_.get(), chunk, sizeof chunk, MSG_DONTWAIT);
  if (count > 0) coming_.insert(coming_.end(), chunk, chunk + count);
  return count;
}

std::optional<std::span<const std::byte>> ControlLine::next() {
  uint32_t length = 0;
  const std::span<std::byte> here = std::span(coming_).subspan(at_);
  const auto all_is_read = [&]() -> std::optional<std::span<const std::byte>> {
    coming_.erase(coming_.begin(), coming_.begin() + static_cast<std::ptrdiff_t>(at_));
    at_ = 0;
    return std::nullopt;
  };
  if (here.size() < sizeof length) return all_is_read();
  std::memcpy(&length, here.data(), sizeof length);
  if (length == 0 || length > kLargest)
    WireReader::malformed("a control message of " + std::to_string(length) + " bytes");
  const size_t whole = length + Seals::kBytes;
  if (here.size() - sizeof length < whole) return all_is_read();
  const auto sealed = here.subspan(sizeof length, whole);
  if (!seals_->in.opens(sealed)) WireReader::malformed(kBrokenSeal);
  at_ += sizeof length + whole;
  if (counts(sealed[0])) ++taken_;
  return sealed.first(length);
}

}  // namespace farandole
