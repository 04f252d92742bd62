#include "transport/mpi_port.h"

#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <optional>
#include <thread>

#include "base/copy.h"
#include "base/log.h"

namespace farandole {
namespace {

constexpr size_t kReceives = 4;      // posted ahead for each link: MPI fills one while we take one
constexpr size_t kMostSends = 16;    // frames of one link that MPI has, for more data to go to it
constexpr size_t kSmall = 4096;      // what arrives is copied, and its long buffer is free again
constexpr size_t kMostShut = 4096;   // channels of a link that it remembers
constexpr size_t kMostBuffers = 64;  // kept for the next frames
constexpr auto kPatience = std::chrono::seconds(1);  // for a death to be seen by all that it ends
constexpr auto kLastSends = std::chrono::milliseconds(500);
constexpr auto kLastReceives = std::chrono::milliseconds(100);

Error foreign(int peer) {
  return {ErrorCode::link,
          "rank " + std::to_string(peer) + " sent by MPI what is no message of this transport"};
}

/// Bytes that MPI may still read or write: never freed.
std::vector<std::unique_ptr<std::byte[]>>& lent_for_ever() {
  static auto* const kept = new std::vector<std::unique_ptr<std::byte[]>>;
  return *kept;
}

}  // namespace

enum class MpiPort::Kind : uint32_t { data, consumed };

/// What a message begins with; data follow.
struct MpiPort::Frame {
  uint64_t world, stream;
  int32_t lane;
  Kind kind;
  uint64_t count;  // of bytes: of data, or consumed
};

MpiPort::MpiPort(std::unique_ptr<MpiFunctions> functions, int rank, int size, uint64_t world)
    : functions_(std::move(functions)), rank_(rank), size_(size), world_(world) {}

MpiPort::~MpiPort() {
  close();
  keep_what_mpi_uses();
}

// ---- channels ----

std::shared_ptr<MpiPipe> MpiPort::open(int peer, uint64_t stream, int lane) {
  const std::lock_guard lock(mutex_);
  return pipe_of(link_to(peer), {stream, lane});
}

/// Made by whoever comes first: who opens it, or a frame for it.
std::shared_ptr<MpiPipe> MpiPort::pipe_of(Link& link, const MpiPipe::Key& key) {
  std::shared_ptr<MpiPipe>& pipe = link.pipes[key];
  if (!pipe) {
    pipe = std::make_shared<MpiPipe>();
    pipe->peer = link.peer;
    pipe->key = key;
  }
  return pipe;
}

void MpiPort::shut(const MpiPipe& pipe) {
  const std::lock_guard lock(mutex_);
  Link& link = link_to(pipe.peer);
  link.pipes.erase(pipe.key);
  link.shut.insert(pipe.key);
  link.shut_in_order.push_back(pipe.key);
  if (link.shut_in_order.size() <= kMostShut) return;
  link.shut.erase(link.shut_in_order.front());
  link.shut_in_order.pop_front();
}

size_t MpiPort::write(const std::shared_ptr<MpiPipe>& pipe, std::span<const std::byte> bytes) {
  const std::lock_guard lock(mutex_);
  if (bytes.empty() || !usable()) return 0;
  Link& link = link_to(pipe->peer);
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
    if (count > 0) send(link, Kind::data, pipe, count, bytes.first(count));
  });
  if (state_ != State::open) return 0;
  pipe->ahead += count;
  return count;
}

bool MpiPort::drained(const MpiPipe& pipe) {
  const std::lock_guard lock(mutex_);
  const auto is = [&] { return pipe.with_mpi == 0 && pipe.ahead <= kQuiet; };
  if (is() || !usable()) return is();
  guard([&] { progress(link_to(pipe.peer)); });
  return is();
}

std::span<const std::byte> MpiPort::peek(MpiPipe& pipe, size_t at_least) {
  const std::lock_guard lock(mutex_);
  if (pipe.count < at_least || pipe.count == 0) {
    if (!usable()) return {};
    guard([&] { progress(link_to(pipe.peer)); });
  }
  if (pipe.count < at_least || pipe.count == 0) return {};
  if (pipe.arrived.front().size() < at_least) join(pipe, at_least);
  const MpiPipe::Piece& front = pipe.arrived.front();
  return {front.bytes.get() + front.begin, front.size()};
}

void MpiPort::consume(const std::shared_ptr<MpiPipe>& pipe, size_t count) {
  const std::lock_guard lock(mutex_);
  pipe->count -= count;
  pipe->owed += count;
  for (size_t left = count; left > 0;) {
    MpiPipe::Piece& front = pipe->arrived.front();
    const size_t taken = std::min(left, front.size());
    front.begin += taken;
    left -= taken;
    if (front.size() > 0) break;
    give_back(std::move(front.bytes), front.whole);
    pipe->arrived.pop_front();
  }
  if (pipe->owed < kQuiet / 2 || state_ != State::open) return;
  guard([&] {
    send(link_to(pipe->peer), Kind::consumed, pipe, pipe->owed, {});
    pipe->owed = 0;
  });
}

/// An element that two pieces share is made whole.
void MpiPort::join(MpiPipe& pipe, size_t at_least) {
  MpiPipe::Piece joined{std::make_unique_for_overwrite<std::byte[]>(at_least), 0, 0, false};
  while (joined.end < at_least) {
    MpiPipe::Piece& front = pipe.arrived.front();
    const size_t taken = std::min(at_least - joined.end, front.size());
    std::memcpy(joined.bytes.get() + joined.end, front.bytes.get() + front.begin, taken);
    joined.end += taken;
    front.begin += taken;
    if (front.size() > 0) break;
    give_back(std::move(front.bytes), front.whole);
    pipe.arrived.pop_front();
  }
  pipe.arrived.push_front(std::move(joined));
}

// ---- links ----

MpiPort::Link& MpiPort::link_to(int peer) {
  const auto [found, is_new] = links_.try_emplace(peer);
  if (is_new) {
    found->second.peer = peer;
    if (state_ == State::open) expects_.store(true, std::memory_order_relaxed);
  }
  return found->second;
}

void MpiPort::progress(Link& link) {
  while (link.receives.size() < kReceives) post(link);
  for (size_t bytes = 0; functions_->test(link.receives.front().request, &bytes);) {
    Receive receive = std::move(link.receives.front());
    link.receives.pop_front();
    take(link, receive, bytes);
    if (receive.bytes) give_back(std::move(receive.bytes), true);
    post(link);
  }
  while (!link.sends.empty() && functions_->test(link.sends.front().request)) {
    Send& sent = link.sends.front();
    if (sent.of) --sent.of->with_mpi;
    give_back(std::move(sent.bytes), sent.whole);
    link.sends.pop_front();
  }
}

void MpiPort::progress_all() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::open) return;
  guard([&] {
    for (auto& [peer, link] : links_) progress(link);
  });
}

void MpiPort::post(Link& link) {
  Receive receive{whole_buffer(), {}};
  receive.request = functions_->receive({receive.bytes.get(), sizeof(Frame) + kPiece}, link.peer);
  link.receives.push_back(std::move(receive));
}

/// Keeps the receive's buffer where that is cheaper than a copy.
void MpiPort::take(Link& link, Receive& receive, size_t bytes) {
  Frame frame{};
  if (bytes < sizeof frame) throw foreign(link.peer);
  std::memcpy(&frame, receive.bytes.get(), sizeof frame);
  if (frame.world != world_) return;  // of a world before this one
  const MpiPipe::Key key{frame.stream, frame.lane};
  const auto found = link.pipes.find(key);
  if (frame.kind == Kind::consumed) {
    if (found == link.pipes.end()) return;
    if (frame.count > found->second->ahead) throw foreign(link.peer);
    found->second->ahead -= frame.count;
    return;
  }
  if (frame.kind != Kind::data || frame.count != bytes - sizeof frame) throw foreign(link.peer);
  if (found == link.pipes.end() && link.shut.contains(key)) return;
  MpiPipe& pipe = *pipe_of(link, key);
  if (pipe.count + frame.count > kWindow) throw foreign(link.peer);
  MpiPipe::Piece piece{nullptr, sizeof frame, bytes, true};
  if (frame.count > kSmall) {
    piece.bytes = std::move(receive.bytes);
  } else {
    piece = {std::make_unique_for_overwrite<std::byte[]>(frame.count), 0, frame.count, false};
    std::memcpy(piece.bytes.get(), receive.bytes.get() + sizeof frame, frame.count);
  }
  pipe.count += frame.count;
  pipe.arrived.push_back(std::move(piece));
}

void MpiPort::send(Link& link, Kind kind, const std::shared_ptr<MpiPipe>& pipe, size_t count,
                   std::span<const std::byte> bytes) {
  const Frame frame{world_, pipe->key.first, pipe->key.second, kind, count};
  const size_t length = sizeof frame + bytes.size();
  const bool whole = bytes.size() > kSmall;
  Send sending{whole ? whole_buffer() : std::make_unique_for_overwrite<std::byte[]>(length),
               {},
               kind == Kind::data ? pipe : nullptr,
               whole};
  std::memcpy(sending.bytes.get(), &frame, sizeof frame);
  if (!bytes.empty()) copy_bytes(sending.bytes.get() + sizeof frame, bytes.data(), bytes.size());
  sending.request = functions_->send({sending.bytes.get(), length}, link.peer);
  if (sending.of) ++pipe->with_mpi;
  link.sends.push_back(std::move(sending));
}

std::unique_ptr<std::byte[]> MpiPort::whole_buffer() {
  if (buffers_.empty()) return std::make_unique_for_overwrite<std::byte[]>(sizeof(Frame) + kPiece);
  std::unique_ptr<std::byte[]> buffer = std::move(buffers_.back());
  buffers_.pop_back();
  return buffer;
}

void MpiPort::give_back(std::unique_ptr<std::byte[]> buffer, bool whole) {
  if (whole && buffers_.size() < kMostBuffers) buffers_.push_back(std::move(buffer));
}

// ---- the end: see the note ----

/// False where nothing moves any more, and nothing needs to be said of it yet.
bool MpiPort::usable() {
  if (state_ == State::open) return true;
  if (state_ == State::closed || now() - since_ < kPatience) return false;
  throw Error(ErrorCode::link, "no data go over MPI any more: " + why_);
}

/// Runs `body`; an error of MPI's is the end of it.
template <typename Body>
void MpiPort::guard(Body body) {
  try {
    body();
  } catch (const Error& error) {
    const std::string& evidence = error.where().evidence;
    lose(error.verdict() + (evidence.empty() ? "" : " (" + evidence + ")"));
  }
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
  guard([&] {
    if (!finish_sends())
      abandon_mpi("this rank has left before others had received all that it had sent");
    end_receives();
  });
  if (state_ == State::open) state_ = State::closed;
  expects_.store(false, std::memory_order_relaxed);
}

void MpiPort::finalize() {
  const std::lock_guard lock(mutex_);
  if (state_ != State::open) return;
  guard([&] { end_receives(); });
  if (state_ != State::open) return;
  state_ = State::finalized;
  why_ = "MPI_Finalize was called while ranks communicated; call farandole.shutdown() before it";
  since_ = now() - kPatience;  // nothing else will explain it
  expects_.store(false, std::memory_order_relaxed);
}

/// Takes what comes meanwhile: others may have to send before they receive.
bool MpiPort::finish_sends() {
  const Deadline until = Deadline::after(kLastSends);
  for (;;) {
    bool all = true;
    for (auto& [peer, link] : links_) {
      progress(link);
      all &= link.sends.empty();
    }
    if (all || until.passed(now())) return all;
    std::this_thread::sleep_for(std::chrono::microseconds(50));
  }
}

void MpiPort::end_receives() {
  for (auto& [peer, link] : links_)
    for (Receive& receive : link.receives) functions_->cancel(receive.request);
  const Deadline until = Deadline::after(kLastReceives);
  for (auto& [peer, link] : links_)
    while (!link.receives.empty()) {
      if (functions_->test(link.receives.front().request))
        link.receives.pop_front();
      else if (until.passed(now()))
        return;
    }
}

void MpiPort::keep_what_mpi_uses() {
  for (auto& [peer, link] : links_) {
    for (Receive& receive : link.receives) lent_for_ever().push_back(std::move(receive.bytes));
    for (Send& sending : link.sends) lent_for_ever().push_back(std::move(sending.bytes));
  }
}

// ---- of the process ----

namespace {

/// Never freed: MPI_Finalize may come after everything else has been destroyed.
struct Ending {
  std::mutex mutex;  // guards what follows
  bool watched = false;
  std::optional<std::string> abandoned;  // why
  std::weak_ptr<MpiPort> port;
};
Ending& ending_of_mpi() {
  static auto* const ending = new Ending;
  return *ending;
}

void when_mpi_ends() {
  Ending& ending = ending_of_mpi();
  std::shared_ptr<MpiPort> port;
  {
    const std::lock_guard lock(ending.mutex);
    port = ending.port.lock();
    if (ending.abandoned) {
      log(LogLevel::warning, "MPI_Finalize would wait for ever (" + *ending.abandoned +
                                 "); this process ends with exit code 1");
      std::fflush(nullptr);
      ::_exit(1);
    }
  }
  if (port) port->finalize();
}

}  // namespace

void abandon_mpi(const std::string& why) {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  if (ending.watched && !ending.abandoned) ending.abandoned = why;
}

void watch_the_end_of_mpi(MpiFunctions& functions) {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  if (!std::exchange(ending.watched, true)) functions.at_finalize(&when_mpi_ends);
}

void watch_the_end_of_mpi(const std::shared_ptr<MpiPort>& port) {
  Ending& ending = ending_of_mpi();
  const std::lock_guard lock(ending.mutex);
  ending.port = port;
}

}  // namespace farandole
