#include "base/trace.h"

#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/fd.h"
#include "base/fixed_text.h"
#include "base/trace_store.h"

namespace farandole {
namespace {

// Turns with a shorter pause between them are one event: a large operation takes hundreds.
constexpr auto kSameTurn = std::chrono::microseconds(20);
constexpr auto kWritePatience = std::chrono::milliseconds(200);  // for a recording thread
constexpr uint64_t kWorldSalt = 0x9e3779b97f4a7c15;

/// A directory in which this user may write, made if it is not there.
std::string made(const std::string& path) {
  for (size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) throw_errno("mkdir " + part);
  }
  const std::string inside = path + "/.";  // refuses what is no directory
  checked(::access(inside.c_str(), W_OK | X_OK), "access " + inside);
  return path;
}

/// A child has its parent's rings mapped, and must not write there.
std::atomic<bool> forked{false};

void watch_for_forks() {
  static const int installed =
      ::pthread_atfork(nullptr, nullptr, [] { forked.store(true, std::memory_order_relaxed); });
  if (installed != 0) throw Error(ErrorCode::resource, "pthread_atfork failed");
}

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

// ---- recording ----

/// The events of one thread, which lie in the store. They are written between enter() and leave()
/// by that thread; read, after `writing` was set, once nobody is inside.
struct Trace::Ring {
  // A constructor, as clang 14 makes no aggregate from make_unique's parentheses.
  Ring(TraceHead::Row& its_row, TraceEvent* its_events, int64_t its_thread)
      : row(its_row), events(its_events), thread(its_thread) {}

  TraceHead::Row& row;
  TraceEvent* const events;
  const int64_t thread;
  uint64_t last_turn = kNone;  // index of the turn that the next may extend
  std::atomic<bool> inside{false};

  static constexpr uint64_t kNone = ~uint64_t{0};

  TraceEvent& at(uint64_t index) { return events[index % kEventsPerThread]; }
  uint64_t written() const { return row.written.load(std::memory_order_relaxed); }

  /// False while the rings are being read. seq_cst; partner: write, which sets and then looks.
  bool enter(const std::atomic<bool>& writing) {
    inside.exchange(true);
    if (!writing.load() && !forked.load(std::memory_order_relaxed)) return true;
    leave();
    return false;
  }
  void leave() { inside.store(false, std::memory_order_release); }  // partner: write, enter

  void append(const TraceEvent& event) {
    at(written()) = event;
    row.written.store(written() + 1, std::memory_order_release);  // partner: who reads the file
  }
};

Trace::Trace(Identity identity)
    : identity_(std::move(identity)),
      id_(next_id()),
      store_((made(identity_.directory), std::make_unique<TraceStore>(identity_))) {
  watch_for_forks();
}
Trace::~Trace() = default;

Trace::Ring* Trace::my_ring() {
  struct Mine {
    uint64_t trace = 0;
    Ring* ring = nullptr;
  };
  thread_local Mine mine;  // a cache; the rings are their trace's
  if (mine.trace != id_) [[unlikely]]
    mine = {id_, open_ring()};
  return mine.ring;
}

/// Null when there are too many threads, or nothing is recorded any more. A thread that got the
/// number of an ended one goes on with its ring.
Trace::Ring* Trace::open_ring() {
  if (forked.load(std::memory_order_relaxed)) return nullptr;
  const int64_t thread = ::gettid();
  char name[16] = {};
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  const std::lock_guard lock(mutex_);
  for (const auto& ring : rings_)
    if (ring->thread == thread) return ring.get();
  const size_t number = rings_.size();
  if (closed_ || number == kMostThreads || !store_->reserve(number)) return nullptr;
  TraceHead& head = store_->head();
  TraceHead::Row& row = head.row[number];
  row.thread = thread;
  copy_cut(thread == ::getpid() ? "main" : name, row.name);
  rings_.push_back(std::make_unique<Ring>(row, store_->events(number), thread));
  head.rows.store(static_cast<uint32_t>(number) + 1, std::memory_order_release);
  return rings_.back().get();
}

void Trace::refuse() {
  if (!forked.load(std::memory_order_relaxed))
    store_->head().refused.fetch_add(1, std::memory_order_relaxed);
}

void Trace::record(const TraceEvent& event) {
  Ring* ring = my_ring();
  if (ring == nullptr || !ring->enter(writing_)) {
    refuse();
    return;
  }
  if (event.track == 0) ring->last_turn = Ring::kNone;
  ring->append(event);
  ring->leave();
}

void Trace::turn(TimePoint begin, TimePoint end) {
  Ring* ring = my_ring();
  if (ring == nullptr || !ring->enter(writing_)) {
    refuse();
    return;
  }
  const bool kept =
      ring->last_turn != Ring::kNone && ring->written() - ring->last_turn <= kEventsPerThread;
  if (kept && begin - ring->at(ring->last_turn).end < kSameTurn) {
    TraceEvent& last = ring->at(ring->last_turn);
    last.end = end;
    ++last.count;
  } else {
    TraceEvent event;
    event.kind = TraceKind::turn;
    event.count = 1;
    event.begin = begin;
    event.end = end;
    copy_cut("moving", event.label);
    ring->last_turn = ring->written();
    ring->append(event);
  }
  ring->leave();
}

void Trace::separate() {
  if (Ring* ring = my_ring()) ring->last_turn = Ring::kNone;
}

void TraceSpan::begin(TraceKind kind, std::string_view name, uint64_t bytes) {
  kind_ = kind;
  bytes_ = bytes;
  copy_cut(name, name_);
  trace_->separate();
  begin_ = now();
}

void TraceSpan::end() noexcept {
  TraceEvent event;
  event.kind = kind_;
  event.begin = begin_;
  event.end = now();
  event.bytes = bytes_;
  std::memcpy(event.name, name_, sizeof name_);
  trace_->record(event);
}

void TraceSteps::begin(Trace* trace) {
  if (trace_ != trace) track_ = trace->track(name_, key_);
  trace_ = trace;
  since_ = now();
}

void TraceSteps::close() {
  if (since_ == TimePoint{}) return;
  TraceEvent event;
  event.kind = TraceKind::step;
  event.track = track_;
  event.sequence = ++number_;
  event.begin = since_;
  event.end = now();
  copy_cut("step", event.label);
  trace_->record(event);
  since_ = {};
}

void Trace::next_world() {
  const std::lock_guard lock(mutex_);
  ++worlds_;
}

uint32_t Trace::track(const std::string& name, uint64_t key) {
  if (forked.load(std::memory_order_relaxed)) return 1;
  const std::lock_guard lock(mutex_);
  key ^= worlds_ * kWorldSalt;
  TraceHead& head = store_->head();
  const uint32_t count = head.tracks.load(std::memory_order_relaxed);
  for (uint32_t i = 0; i < count; ++i)
    if (head.track[i].key == key && text_in(head.track[i].name) == name) return i + 1;
  if (count == TraceHead::kMostTracks) return count;  // they share the last row
  head.track[count].key = key;
  copy_cut(name, head.track[count].name);
  head.tracks.store(count + 1, std::memory_order_release);
  return count + 1;
}

// ---- writing ----

/// After `writing_` was set, with `mutex_`: returns when no thread records.
void Trace::wait_until_outside() const {
  const Deadline patience = Deadline::after(kWritePatience);
  for (const auto& ring : rings_)
    while (ring->inside.load()) {  // a few instructions, unless its thread was put to sleep there
      if (patience.passed(now()))
        throw Error(ErrorCode::resource,
                    "thread '" + text_in(ring->row.name) + "' does not stop recording");
      std::this_thread::yield();
    }
}

void Trace::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  writing_.store(true);
  wait_until_outside();
  store_->unlink();
  store_->let_go();
}

void Trace::drop_file() {
  if (written_ && !forked.load(std::memory_order_relaxed)) store_->unlink();
}

void Trace::write() {
  const std::lock_guard lock(mutex_);
  if (closed_) throw Error(ErrorCode::resource, "the trace is closed");
  writing_.store(true);
  struct Leave {
    std::atomic<bool>& flag;
    ~Leave() { flag.store(false); }
  } leave{writing_};
  wait_until_outside();
  write_trace_file(identity_.directory, store_->part_name(), store_->part(true));
  written_ = true;
}

}  // namespace farandole
