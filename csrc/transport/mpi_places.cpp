// Bytes that go straight from memory of a channel's user to where they shall lie: see the note in
// transport/mpi_port.h.
#include <algorithm>
#include <mutex>
#include <set>
#include <utility>

#include "transport/mpi_end.h"
#include "transport/mpi_frame.h"

namespace farandole {
namespace {

constexpr size_t kAwaited = 2;  // pieces of a transfer: one comes while one is folded
constexpr auto kAnswer = std::chrono::milliseconds(250);  // of the peer to what it was told

/// Tags that this process never uses again: a late message may come for them in any later world.
std::set<int>& burnt_tags() {
  static auto* const tags = new std::set<int>;
  return *tags;
}
std::mutex burnt_mutex;  // guards them

}  // namespace

// ---- the receiver ----

void MpiPort::offer(const std::shared_ptr<MpiPipe>& pipe, std::byte* place, size_t count) {
  const std::lock_guard lock(mutex_);
  if (!usable()) return;
  pipe->place = place;
  pipe->unposted = count;
  guard([&] { await(pipe); });
}

/// Posts receives for the next bytes, and tells the peer. Pieces that have arrived and are not
/// consumed count as well, so that the buffers to be folded stay few, and hot.
void MpiPort::await(const std::shared_ptr<MpiPipe>& pipe) {
  MpiLink& link = *pipe->link;
  while (pipe->unposted > 0 && pipe->awaited.size() + pipe->arrived.size() < kAwaited) {
    MpiPipe::Awaited next{.place = pipe->place, .tag = new_tag(link)};
    next.count = std::min(pipe->unposted, next.place != nullptr ? kPlaced : kFolded);
    if (next.place == nullptr) next.bytes = buffer(true);
    next.request = functions_->receive({next.memory(), next.count}, link.peer, next.tag);
    MpiFrame told = frame_of(*pipe, MpiFrameKind::place, pipe->unposted);
    told.tag = next.tag;
    told.takes = static_cast<uint32_t>(next.count);
    if (pipe->place != nullptr) pipe->place += next.count;
    pipe->unposted -= next.count;
    pipe->awaited.push_back(std::move(next));
    send(link, told, pipe, {});
  }
}

int MpiPort::new_tag(MpiLink& link) {
  const std::lock_guard lock(burnt_mutex);
  int tag = 0;
  do {
    tag = kMpiFirstPlace + link.next_tag;
    link.next_tag = (link.next_tag + 1) % kMpiPlaces;
  } while (burnt_tags().contains(tag));
  return tag;
}

/// Turns receives that are complete into arrived pieces.
void MpiPort::collect(const std::shared_ptr<MpiPipe>& pipe) {
  MpiLink& link = *pipe->link;
  while (!pipe->awaited.empty() && receive_rest(link, pipe->awaited.front(), false)) {
    MpiPipe::Awaited done = std::move(pipe->awaited.front());
    pipe->awaited.pop_front();
    keep(*pipe, {.bytes = std::move(done.bytes),
                 .end = done.here,
                 .whole = true,
                 .place = done.place,
                 .straight = true});
  }
  await(pipe);
  if (pipe->is_expecting()) return;
  for (MpiPipe::Piece& piece : std::exchange(pipe->later, {})) keep(*pipe, std::move(piece));
}

/// True when nothing is posted for it any more. A message may be shorter than the receive: the rest
/// follows, or an empty message, which says that no more will. The sender's verdict explains why.
bool MpiPort::receive_rest(MpiLink& link, MpiPipe::Awaited& awaited, bool ends) {
  size_t bytes = 0;
  if (awaited.over) return ends;
  if (!functions_->test(awaited.request, &bytes)) return false;
  if (awaited.burnt) return true;
  awaited.over = bytes == 0;
  if (awaited.over) return ends;
  awaited.here += bytes;
  if (awaited.here > awaited.count) throw foreign_message(link.peer);
  if (awaited.here == awaited.count) return true;
  awaited.request = functions_->receive(
      {awaited.memory() + awaited.here, awaited.count - awaited.here}, link.peer, awaited.tag);
  return false;
}

// ---- the sender ----

/// A small part of a receive is not worth a message, since more will be ready soon.
bool MpiPort::takes(const MpiPipe& pipe, size_t ready) {
  const std::lock_guard lock(mutex_);
  if (!usable()) return false;
  if (pipe.granted.empty()) guard([&] { progress(*pipe.link); });
  if (state_ != State::open || pipe.granted.empty()) return false;
  return ready >= std::min(pipe.granted.front().count, kFolded / 2);
}

size_t MpiPort::send_straight(const std::shared_ptr<MpiPipe>& pipe,
                              std::span<const std::byte> bytes) {
  MpiLink& link = *pipe->link;
  size_t sent = 0;
  guard([&] {
    while (sent < bytes.size() && !pipe->granted.empty()) {
      MpiPipe::Granted& to = pipe->granted.front();
      const size_t count = std::min(bytes.size() - sent, to.count);
      const MpiRequest request = functions_->send(bytes.subspan(sent, count), link.peer, to.tag);
      link.straight.push_back({request, pipe});
      ++pipe->straight;
      ++pipe->with_mpi;
      sent += count;
      to.count -= count;
      if (to.count == 0) pipe->granted.pop_front();
    }
  });
  return sent;
}

void MpiPort::finish_straight(MpiLink& link) {
  std::erase_if(link.straight, [&](MpiLink::Straight& sent) {
    if (!functions_->test(sent.request)) return false;
    if (sent.of) {
      --sent.of->straight;
      --sent.of->with_mpi;
    }
    return true;
  });
}

bool MpiPort::refers(const MpiPipe& pipe) {
  if (pipe.straight == 0) return false;
  const std::lock_guard lock(mutex_);
  if (usable()) guard([&] { progress(*pipe.link); });
  return pipe.straight > 0;
}

// ---- the end in the middle of something ----

/// Sends an empty message to a receive that will get no bytes.
void MpiPort::answer(MpiLink& link, int tag) {
  link.straight.push_back({functions_->send({}, link.peer, tag), nullptr});
}

void MpiPort::answer_all(MpiLink& link, MpiPipe& pipe) {
  for (const MpiPipe::Granted& to : std::exchange(pipe.granted, {})) answer(link, to.tag);
}

void MpiPort::end_awaited(MpiLink& link, MpiPipe& pipe) {
  std::erase_if(pipe.awaited, [&](MpiPipe::Awaited& awaited) {
    if (!receive_rest(link, awaited, true)) return false;
    give_back(std::move(awaited.bytes), true);
    return true;
  });
}

void MpiPort::cancel_awaited(MpiPipe& pipe) {
  if (std::exchange(pipe.cancelled, true)) return;
  const std::lock_guard lock(burnt_mutex);
  for (MpiPipe::Awaited& awaited : pipe.awaited) {
    if (awaited.over) continue;
    functions_->cancel(awaited.request);
    burnt_tags().insert(awaited.tag);
    awaited.burnt = true;
  }
}

Held MpiPort::let_go(const std::shared_ptr<MpiPipe>& pipe) {
  const std::lock_guard lock(mutex_);
  MpiLink& link = *pipe->link;
  const auto holds = [&] {
    return pipe->straight > 0 || std::ranges::any_of(pipe->awaited, [](const auto& awaited) {
             return awaited.place != nullptr;
           });
  };
  if (state_ == State::open && may_call())
    guard([&] {
      if (!std::exchange(pipe->ends, true)) {
        pipe->ends_since = now();
        pipe->unposted = 0;
        answer_all(link, *pipe);
      }
      progress(link);
      if (now() - pipe->ends_since > kAnswer) cancel_awaited(*pipe);
      end_awaited(link, *pipe);
    });
  if (!holds()) return Held::no;
  if (state_ == State::open && now() - pipe->ends_since < kLongestHold) return Held::for_now;
  lose("rank " + std::to_string(link.peer) +
       " did not take part in ending a transfer, and MPI may still use its memory");
  leave_memory_with_mpi();
  return Held::for_ever;
}

}  // namespace farandole
