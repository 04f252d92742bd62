#include "transport/mpi_port.h"

#include <algorithm>
#include <cstring>
#include <thread>
#include <utility>

#include "base/copy.h"
#include "transport/mpi_end.h"
#include "transport/mpi_frame.h"

namespace farandole {
namespace {

constexpr size_t kReceives = 4;     // posted ahead for each link: MPI fills one while we take one
constexpr size_t kMostSends = 16;   // frames of one link that MPI has, for more data to go to it
constexpr int kLooks = 4;           // for what is awaited, in a row: the engine's turn takes longer
constexpr size_t kSmall = 4096;     // what arrives is copied, and its long buffer is free again
constexpr size_t kMostShut = 4096;  // channels of a link that it remembers
constexpr size_t kMostBuffers = 64;                  // kept for the next frames
constexpr auto kPatience = std::chrono::seconds(1);  // for a death to be seen by all that it ends
constexpr auto kLastSends = std::chrono::milliseconds(500);
constexpr auto kLastReceives = std::chrono::milliseconds(100);

/// Bytes that MPI may still read or write: never freed.
std::vector<std::unique_ptr<std::byte[]>>& lent_for_ever() {
  static auto* const kept = new std::vector<std::unique_ptr<std::byte[]>>;
  return *kept;
}

}  // namespace

MpiPort::MpiPort(std::unique_ptr<MpiFunctions> functions, int rank, int size, uint64_t world,
                 const Key& secret, MpiThreads threads, std::shared_ptr<MpiDuplicates> duplicates)
    : functions_(std::move(functions)),
      rank_(rank),
      size_(size),
      world_(world),
      secret_(secret),
      threads_(threads),
      duplicates_(std::move(duplicates)) {}

MpiPort::~MpiPort() {
  close();
  keep_what_mpi_uses();
}

ConnectionKeys MpiPort::keys_for(int peer, const std::string& purpose) const {
  const auto salt = std::as_bytes(std::span(&world_, 1));
  const auto key = [&](int from, int to) {
    return derived_key(secret_, salt,
                       "farandole mpi, from rank " + std::to_string(from) + " to rank " +
                           std::to_string(to) + ", " + purpose);
  };
  return {.out = key(rank_, peer), .in = key(peer, rank_)};
}

// ---- channels ----

std::shared_ptr<MpiPipe> MpiPort::open(int peer, uint64_t stream, int lane) {
  const std::lock_guard lock(mutex_);
  return pipe_of(link_to(peer), {stream, lane});
}

/// Makes the pipe when it is opened, or when the first frame for it comes.
std::shared_ptr<MpiPipe> MpiPort::pipe_of(MpiLink& link, const MpiPipe::Key& key) {
  std::shared_ptr<MpiPipe>& pipe = link.pipes[key];
  if (!pipe) {
    pipe = std::make_shared<MpiPipe>();
    pipe->link = &link;
    pipe->key = key;
  }
  return pipe;
}

void MpiPort::shut(const std::shared_ptr<MpiPipe>& pipe) {
  const std::lock_guard lock(mutex_);
  MpiLink& link = *pipe->link;
  pipe->ends = true;
  if (!pipe->awaited.empty() || !pipe->granted.empty()) link.ending.push_back(pipe);
  link.pipes.erase(pipe->key);
  link.shut.insert(pipe->key);
  link.shut_in_order.push_back(pipe->key);
  if (link.shut_in_order.size() <= kMostShut) return;
  link.shut.erase(link.shut_in_order.front());
  link.shut_in_order.pop_front();
}

size_t MpiPort::write(const std::shared_ptr<MpiPipe>& pipe, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes.empty() || !usable()) return 0;
  if (pipe->granted.empty() && pipe->promised > 0) guard([&] { progress(*pipe->link); });
  if (!pipe->granted.empty()) return send_straight(pipe, bytes);
  if (pipe->promised > 0) return 0;
  MpiLink& link = *pipe->link;
  const auto room = [&] {
    if (link.sends.size() >= kMostSends) return size_t{0};
    const size_t count = std::min({bytes.size(), kWindow - pipe->ahead, kPiece});
    return count < bytes.size() && count < kPiece / 2 ? 0 : count;  // more will fit soon
  };
  size_t count = room();
  guard([&] {
    if (count == 0) {
      progress(link);
      count = room();
    }
    if (count > 0) send(link, frame_of(*pipe, MpiFrameKind::data, count), pipe, bytes.first(count));
  });
  if (state_ != State::open) return 0;
  pipe->ahead += count;
  return count;
}

bool MpiPort::drained(const MpiPipe& pipe) {
  const auto is = [&] { return pipe.with_mpi == 0 && pipe.ahead <= kQuiet; };
  if (is()) return true;
  const std::lock_guard lock(mutex_);
  if (!usable()) return is();
  guard([&] { progress(*pipe.link); });
  return is();
}

std::span<const std::byte> MpiPort::peek(const std::shared_ptr<MpiPipe>& pipe, size_t at_least) {
  const std::lock_guard lock(mutex_);
  const auto lacks = [&] { return pipe->count < at_least || pipe->count == 0; };
  if (lacks()) {
    if (!usable()) return {};
    guard([&] {
      if (pipe->is_expecting()) collect(pipe);
      for (int look = 0; look < kLooks && lacks(); ++look)
        progress(*pipe->link, pipe.get(), at_least);
    });
  }
  if (lacks()) return {};
  if (pipe->arrived.front().size() < at_least) join(*pipe, at_least);
  const MpiPipe::Piece& front = pipe->arrived.front();
  return {front.data(), front.size()};
}

void MpiPort::consume(const std::shared_ptr<MpiPipe>& pipe, size_t count) {
  const std::lock_guard lock(mutex_);
  pipe->count -= count;
  for (size_t left = count; left > 0;) {
    MpiPipe::Piece& front = pipe->arrived.front();
    const size_t taken = std::min(left, front.size());
    if (!front.straight) {
      pipe->framed -= taken;
      pipe->owed += taken;
    }
    front.begin += taken;
    left -= taken;
    if (front.size() > 0) break;
    give_back(std::move(front.bytes), front.whole);
    pipe->arrived.pop_front();
  }
  if (state_ != State::open || !may_call()) return;
  if (pipe->unposted > 0) guard([&] { await(pipe); });
  if (pipe->owed < kQuiet / 2) return;
  guard([&] {
    send(*pipe->link, frame_of(*pipe, MpiFrameKind::consumed, pipe->owed), pipe, {});
    pipe->owed = 0;
  });
}

/// Joins the parts of an element that lies in two pieces.
void MpiPort::join(MpiPipe& pipe, size_t at_least) {
  MpiPipe::Piece joined{.bytes = buffer(at_least > kSmall), .whole = at_least > kSmall};
  joined.straight = pipe.arrived.front().straight;
  while (joined.end < at_least) {
    MpiPipe::Piece& front = pipe.arrived.front();
    const size_t taken = std::min(at_least - joined.end, front.size());
    std::memcpy(joined.bytes.get() + joined.end, front.data(), taken);
    joined.end += taken;
    front.begin += taken;
    if (front.size() > 0) break;
    give_back(std::move(front.bytes), front.whole);
    pipe.arrived.pop_front();
  }
  pipe.arrived.push_front(std::move(joined));
}

// ---- links ----

MpiLink& MpiPort::link_to(int peer) {
  const auto known = links_.find(peer);
  if (known != links_.end()) return known->second;
  if (state_ == State::open) expects_.store(true, std::memory_order_relaxed);
  return links_.try_emplace(peer, peer, keys_for(peer, "heads of frames")).first->second;
}

/// Takes messages that have come, but no more than `until` lacks: its reader needs nothing else.
void MpiPort::progress(MpiLink& link, const MpiPipe* until, size_t at_least) {
  while (link.receives.size() < kReceives) post(link);
  for (size_t bytes = 0; functions_->test(link.receives.front().request, &bytes);) {
    MpiLink::Receive receive = std::move(link.receives.front());
    link.receives.pop_front();
    take(link, receive, bytes);
    if (receive.bytes) give_back(std::move(receive.bytes), true);
    post(link);
    if (until != nullptr && until->count >= at_least) break;
  }
  while (!link.sends.empty() && functions_->test(link.sends.front().request)) {
    MpiLink::Send& sent = link.sends.front();
    if (sent.of) --sent.of->with_mpi;
    give_back(std::move(sent.bytes), sent.whole);
    link.sends.pop_front();
  }
  if (!link.straight.empty()) finish_straight(link);
  if (link.ending.empty()) return;
  for (const auto& pipe : link.ending) {
    answer_all(link, *pipe);
    end_awaited(link, *pipe);
  }
  std::erase_if(link.ending, [](const auto& pipe) { return pipe->awaited.empty(); });
}

void MpiPort::progress_all() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::open || !may_call()) return;
  guard([&] {
    for (auto& [peer, link] : links_) progress(link);
    progress_joined();
  });
}

void MpiPort::post(MpiLink& link) {
  MpiLink::Receive receive{buffer(true), {}};
  receive.request = functions_->receive({receive.bytes.get(), kMpiHead + kPiece}, link.peer);
  link.receives.push_back(std::move(receive));
}

/// Keeps the receive's buffer where that is cheaper than a copy.
void MpiPort::take(MpiLink& link, MpiLink::Receive& receive, size_t bytes) {
  MpiFrame frame{};
  if (bytes < kMpiHead) throw foreign_message(link.peer);
  std::memcpy(&frame, receive.bytes.get(), sizeof frame);
  if (frame.world != world_) return;  // of a world before this one
  if (!link.seals.in.opens({receive.bytes.get(), kMpiHead})) throw foreign_message(link.peer);
  if (frame.kind == MpiFrameKind::begun) return join(frame, link.peer);
  const MpiPipe::Key key{frame.stream, frame.lane};
  const auto found = link.pipes.find(key);
  const bool is_shut = found == link.pipes.end() && link.shut.contains(key);
  if (frame.kind == MpiFrameKind::consumed) {
    if (found == link.pipes.end()) return;
    if (frame.count > found->second->ahead) throw foreign_message(link.peer);
    found->second->ahead -= frame.count;
    return;
  }
  if (frame.kind == MpiFrameKind::place) {
    if (frame.takes == 0 || frame.takes > frame.count || frame.tag < kMpiFirstPlace ||
        frame.tag >= kMpiFirstPlace + kMpiPlaces)
      throw foreign_message(link.peer);
    if (is_shut || pipe_of(link, key)->ends) return answer(link, frame.tag);
    MpiPipe& pipe = *pipe_of(link, key);
    pipe.granted.push_back({frame.takes, frame.tag});
    pipe.promised = frame.count - frame.takes;
    return;
  }
  if (frame.kind != MpiFrameKind::data || frame.count != bytes - kMpiHead)
    throw foreign_message(link.peer);
  if (is_shut) return;
  MpiPipe& pipe = *pipe_of(link, key);
  if (pipe.framed + frame.count > kWindow) throw foreign_message(link.peer);
  pipe.framed += frame.count;
  MpiPipe::Piece piece{.begin = kMpiHead, .end = bytes, .whole = true};
  if (frame.count > kSmall) {
    piece.bytes = std::move(receive.bytes);
  } else {
    piece = {.bytes = buffer(false), .end = frame.count};
    std::memcpy(piece.bytes.get(), receive.bytes.get() + kMpiHead, frame.count);
  }
  if (pipe.is_expecting())
    pipe.later.push_back(std::move(piece));
  else
    keep(pipe, std::move(piece));
}

void MpiPort::keep(MpiPipe& pipe, MpiPipe::Piece piece) {
  pipe.count += piece.size();
  pipe.arrived.push_back(std::move(piece));
}

MpiFrame MpiPort::frame_of(const MpiPipe& pipe, MpiFrameKind kind, size_t count) const {
  return {.world = world_,
          .stream = pipe.key.first,
          .lane = pipe.key.second,
          .kind = kind,
          .count = count};
}

/// MPI mostly completes short sends at once.
void MpiPort::send(MpiLink& link, const MpiFrame& frame, const std::shared_ptr<MpiPipe>& pipe,
                   std::span<const std::byte> bytes) {
  const bool whole = bytes.size() > kSmall;
  MpiPipe::Buffer message = buffer(whole);
  const Mark mark = link.seals.out.close(std::as_bytes(std::span(&frame, 1)));
  std::memcpy(message.get(), &frame, sizeof frame);
  std::ranges::copy(mark, message.get() + sizeof frame);
  if (!bytes.empty()) copy_bytes(message.get() + kMpiHead, bytes.data(), bytes.size());
  MpiRequest request = functions_->send({message.get(), kMpiHead + bytes.size()}, link.peer);
  if (!whole && functions_->test(request)) return give_back(std::move(message), false);
  const bool counts = frame.kind == MpiFrameKind::data;
  if (counts) ++pipe->with_mpi;
  link.sends.push_back({std::move(message), request, counts ? pipe : nullptr, whole});
}

size_t MpiPort::bytes_of_buffer(bool whole) {
  return kMpiHead + (whole ? std::max(kPiece, kFolded) : kSmall);
}

MpiPipe::Buffer MpiPort::buffer(bool whole) {
  std::vector<MpiPipe::Buffer>& free = buffers_[whole ? 1 : 0];
  if (free.empty()) return std::make_unique_for_overwrite<std::byte[]>(bytes_of_buffer(whole));
  MpiPipe::Buffer taken = std::move(free.back());
  free.pop_back();
  return taken;
}

void MpiPort::give_back(MpiPipe::Buffer buffer, bool whole) {
  std::vector<MpiPipe::Buffer>& free = buffers_[whole ? 1 : 0];
  if (buffer && free.size() < kMostBuffers) free.push_back(std::move(buffer));
}

// ---- the end: see the note ----

bool MpiPort::may_call() const {
  return threads_ != MpiThreads::funneled || caller_ == std::this_thread::get_id();
}

/// Whether MPI may be called. Throws after its end, once no death will explain that any more.
bool MpiPort::usable() {
  if (state_ == State::open) return may_call();
  if (state_ == State::closed || now() - since_ < kPatience) return false;
  throw Error(ErrorCode::link, "no data go over MPI any more: " + why_);
}

void MpiPort::lose(const std::string& why) {
  if (state_ != State::open) return;
  state_ = State::abandoned;
  why_ = why;
  since_ = now();
  expects_.store(false, std::memory_order_relaxed);
  abandon_mpi(why);
}

void MpiPort::abandon(const std::string& why) {
  const std::lock_guard lock(mutex_);
  lose(why);
}

void MpiPort::close() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::open) return;
  if (!may_call()) return lose("this rank left on another thread than the one that may call MPI");
  guard([&] {
    if (!finish_sends())
      abandon_mpi("this rank has left before others had received all that it had sent");
    end_receives();
  });
  if (state_ == State::open) state_ = State::closed;
  expects_.store(false, std::memory_order_relaxed);
}

void MpiPort::when_finalized(std::function<void()> tell) {
  const std::lock_guard lock(mutex_);
  when_finalized_ = std::move(tell);
}

void MpiPort::finalize() {
  std::unique_lock lock(mutex_);
  if (state_ != State::open) return;
  guard([&] { end_receives(); });
  if (state_ != State::open) return;
  state_ = State::finalized;
  why_ = "MPI_Finalize was called while ranks communicated; call farandole.shutdown() before it";
  since_ = now() - kPatience;  // nothing else will explain it
  expects_.store(false, std::memory_order_relaxed);
  const auto tell = when_finalized_;
  lock.unlock();
  if (tell) tell();
}

/// Takes messages meanwhile, since others may have to send before they receive.
bool MpiPort::finish_sends() {
  const Deadline until = Deadline::after(kLastSends);
  for (;;) {
    bool all = true;
    for (auto& [peer, link] : links_) {
      progress(link);
      all &= link.sends.empty() && link.straight.empty();
    }
    progress_joined();
    all &= joined_.empty();
    if (all || until.passed(now())) return all;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void MpiPort::end_receives() {
  for (auto& [peer, link] : links_) {
    for (const auto& [key, pipe] : link.pipes)
      if (!pipe->awaited.empty()) link.ending.push_back(pipe);
    for (MpiLink::Receive& receive : link.receives) functions_->cancel(receive.request);
    for (const auto& pipe : link.ending) cancel_awaited(*pipe);
  }
  const Deadline until = Deadline::after(kLastReceives);
  for (auto& [peer, link] : links_) {
    while (!link.receives.empty() && !until.passed(now()))
      if (functions_->test(link.receives.front().request)) link.receives.pop_front();
    for (const auto& pipe : link.ending)
      while (!pipe->awaited.empty() && !until.passed(now())) end_awaited(link, *pipe);
  }
}

void MpiPort::keep_what_mpi_uses() {
  const auto keep = [](MpiPipe::Buffer& bytes) {
    if (bytes) lent_for_ever().push_back(std::move(bytes));
  };
  for (auto& [peer, link] : links_) {
    for (MpiLink::Receive& receive : link.receives) keep(receive.bytes);
    for (MpiLink::Send& sending : link.sends) keep(sending.bytes);
    for (const auto& [key, pipe] : link.pipes)
      for (MpiPipe::Awaited& awaited : pipe->awaited) keep(awaited.bytes);
    for (const auto& pipe : link.ending)
      for (MpiPipe::Awaited& awaited : pipe->awaited) keep(awaited.bytes);
  }
  for (const auto& joined : joined_) keep(joined->memory);
}

}  // namespace farandole
