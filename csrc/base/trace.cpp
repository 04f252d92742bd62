#include "base/trace.h"

#include <fcntl.h>
#include <pthread.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <thread>

#include "base/error.h"
#include "base/fd.h"
#include "base/fixed_text.h"

namespace farandole {
namespace {

// Turns with a shorter pause between them are one event: a large operation takes hundreds.
constexpr auto kSameTurn = std::chrono::microseconds(20);
constexpr auto kWritePatience = std::chrono::milliseconds(200);  // for a recording thread
// Above any thread's number, of which Linux has at most 2^22.
constexpr int64_t kFirstTrack = 1'000'000'000;

constexpr uint64_t kWorldSalt = 0x9e3779b97f4a7c15;

constexpr std::array<const char*, 10> kKinds{"operation", "phase", "turn", "wait", "final_wait",
                                             "parked",    "ready", "step", "plan", "user"};

int64_t nanoseconds(TimePoint t) {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(t.time_since_epoch()).count();
}

// ---- JSON ----

/// Chrome counts in microseconds.
std::string microseconds(int64_t ns) {
  char text[32];
  std::snprintf(text, sizeof text, "%lld.%03d", static_cast<long long>(ns / 1000),
                static_cast<int>(ns % 1000));
  return text;
}

std::string hexadecimal(uint64_t value) {
  char text[24];
  std::snprintf(text, sizeof text, "\"%016llx\"", static_cast<unsigned long long>(value));
  return text;
}

std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (const char c : text) {
    if (c == '"' || c == '\\') {
      out += '\\';
      out += c;
    } else if (static_cast<unsigned char>(c) < 0x20) {
      char escape[8];
      std::snprintf(escape, sizeof escape, "\\u%04x", static_cast<unsigned>(c));
      out += escape;
    } else {
      out += c;
    }
  }
  return out + '"';
}

std::string member(std::string_view name, const std::string& json) {
  return ",\"" + std::string(name) + "\":" + json;
}

/// One line about a process (tid -1) or one of its rows.
std::string metadata(int pid, int64_t tid, std::string_view name, const std::string& arguments) {
  std::string line = "{\"ph\":\"M\"" + member("pid", std::to_string(pid));
  if (tid >= 0) line += member("tid", std::to_string(tid));
  return line + member("name", quoted(name)) + member("args", "{" + arguments + "}") + "}\n";
}

// ---- files ----

void make_directories(const std::string& path) {
  for (size_t end = 0; end != std::string::npos;) {
    end = path.find('/', end + 1);
    const std::string part = path.substr(0, end);
    if (::mkdir(part.c_str(), 0700) != 0 && errno != EEXIST) throw_errno("mkdir " + part);
  }
}

void write_all(int fd, std::string_view text, const std::string& name) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    text.remove_prefix(static_cast<size_t>(checked(n, "write " + name)));
  }
}

uint64_t next_id() {
  static std::atomic<uint64_t> last{0};
  return ++last;
}

}  // namespace

// ---- recording ----

/// The events of one thread. Slots are written between enter() and leave() by that thread; read,
/// after `writing` was set, once nobody is inside.
struct Trace::Ring {
  const int64_t thread = ::gettid();
  std::string name;
  std::vector<TraceEvent> events{kEventsPerThread};
  uint64_t written = 0;
  uint64_t last_turn = kNone;  // index of the turn that the next may extend
  std::atomic<bool> inside{false};

  static constexpr uint64_t kNone = ~uint64_t{0};

  TraceEvent& at(uint64_t index) { return events[index % kEventsPerThread]; }
  const TraceEvent& at(uint64_t index) const { return events[index % kEventsPerThread]; }
  uint64_t lost() const { return written - std::min<uint64_t>(written, kEventsPerThread); }

  /// False while the rings are being read. seq_cst; partner: write, which sets and then looks.
  bool enter(const std::atomic<bool>& writing) {
    inside.exchange(true);
    if (!writing.load()) return true;
    leave();
    return false;
  }
  void leave() { inside.store(false, std::memory_order_release); }  // partner: write, enter

  void append(const TraceEvent& event) {
    at(written) = event;
    ++written;
  }
};

Trace::Trace(Identity identity) : identity_(std::move(identity)), id_(next_id()) {}
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
  const int64_t thread = ::gettid();
  char name[16] = {};
  ::pthread_getname_np(::pthread_self(), name, sizeof name);
  const std::lock_guard lock(mutex_);
  for (const auto& ring : rings_)
    if (ring->thread == thread) return ring.get();
  if (closed_ || rings_.size() == kMostThreads) return nullptr;
  rings_.push_back(std::make_unique<Ring>());
  rings_.back()->name = thread == ::getpid() ? "main" : name;
  return rings_.back().get();
}

void Trace::record(const TraceEvent& event) {
  Ring* ring = my_ring();
  if (ring == nullptr || !ring->enter(writing_)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  if (event.track == 0) ring->last_turn = Ring::kNone;
  ring->append(event);
  ring->leave();
}

void Trace::turn(TimePoint begin, TimePoint end) {
  Ring* ring = my_ring();
  if (ring == nullptr || !ring->enter(writing_)) {
    refused_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const bool kept =
      ring->last_turn != Ring::kNone && ring->written - ring->last_turn <= kEventsPerThread;
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
    event.label = "moving";
    ring->last_turn = ring->written;
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
  event.label = "step";
  trace_->record(event);
  since_ = {};
}

void Trace::next_world() {
  const std::lock_guard lock(mutex_);
  ++worlds_;
}

uint32_t Trace::track(const std::string& name, uint64_t key) {
  const std::lock_guard lock(mutex_);
  key ^= worlds_ * kWorldSalt;
  size_t i = 0;
  while (i < tracks_.size() && (tracks_[i].key != key || tracks_[i].name != name)) ++i;
  if (i == tracks_.size()) tracks_.push_back({name, key});
  return static_cast<uint32_t>(i + 1);
}

// ---- writing ----

void Trace::prepare() const {
  make_directories(identity_.directory);
  const std::string inside = identity_.directory + "/.";  // refuses what is no directory
  checked(::access(inside.c_str(), W_OK | X_OK), "access " + inside);
}

/// After `writing_` was set, with `mutex_`: returns when no thread records.
void Trace::wait_until_outside() const {
  const Deadline patience = Deadline::after(kWritePatience);
  for (const auto& ring : rings_)
    while (ring->inside.load()) {  // a few instructions, unless its thread was put to sleep there
      if (patience.passed(now()))
        throw Error(ErrorCode::resource, "thread '" + ring->name + "' does not stop recording");
      std::this_thread::yield();
    }
}

void Trace::close() {
  const std::lock_guard lock(mutex_);
  closed_ = true;
  writing_.store(true);
  wait_until_outside();
  for (const auto& ring : rings_) std::vector<TraceEvent>().swap(ring->events);
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
  const std::string name = "rank-" + std::to_string(identity_.rank) + ".jsonl";
  const std::string path = identity_.directory + "/" + name;
  const std::string beside = identity_.directory + "/." + name + "." + std::to_string(::getpid());
  ::unlink(beside.c_str());
  const Fd file(
      checked(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600),
              "open " + beside));
  try {
    write_all(file.get(), to_json(), beside);
    checked(::rename(beside.c_str(), path.c_str()), "rename to " + path);
  } catch (const Error&) {
    ::unlink(beside.c_str());
    throw;
  }
}

namespace {

/// The picture of one event; of an operation two: in its stream, and from launch to done.
std::string lines_of(const TraceEvent& e, int rank, int64_t tid, uint64_t key) {
  const std::string title = quoted(e.name[0] != 0 ? std::string_view(e.name) : e.label);
  const int64_t begin = nanoseconds(e.begin), end = nanoseconds(e.end);
  const auto head = [&](const char* type, std::string_view category, int64_t at) {
    return "{\"ph\":\"" + std::string(type) + "\"" + member("pid", std::to_string(rank)) +
           member("tid", std::to_string(tid)) + member("ts", microseconds(at)) +
           member("cat", quoted(category)) + member("name", title);
  };
  std::string arguments;
  const auto argue = [&](std::string_view name, const std::string& json) {
    arguments += (arguments.empty() ? "\"" : ",\"") + std::string(name) + "\":" + json;
  };
  if (key != 0) argue("stream", hexadecimal(key));
  if (e.sequence != 0) argue("sequence", std::to_string(e.sequence));
  if (e.bytes != 0 || e.kind == TraceKind::operation) argue("bytes", std::to_string(e.bytes));
  if (e.kind == TraceKind::turn) argue("turns", std::to_string(e.count));
  if (e.kind == TraceKind::operation) {
    argue("collective", quoted(e.label));
    argue("path", quoted(e.path));
    argue("launched", microseconds(nanoseconds(e.launched)));
    if (e.count != 0) argue("failed", "true");
  }
  const auto category = kKinds[static_cast<size_t>(e.kind)];
  const std::string rest = arguments.empty() ? "" : member("args", "{" + arguments + "}");
  std::string lines =
      head("X", category, begin) + member("dur", microseconds(end - begin)) + rest + "}\n";
  if (e.kind != TraceKind::operation) return lines;
  const std::string id = member("id2", "{\"local\":" + hexadecimal(key ^ e.sequence) + "}");
  lines += head("b", "launched", nanoseconds(e.launched)) + id + rest + "}\n";
  lines += head("e", "launched", end) + id + "}\n";
  return lines;
}

}  // namespace

/// Where nobody is inside the rings.
std::string Trace::to_json() const {
  struct Shown {
    const TraceEvent* event;
    int64_t tid;
    uint64_t key;
  };
  std::vector<Shown> shown;
  std::string rows;
  const int rank = identity_.rank;
  const auto row = [&](int64_t tid, const std::string& name, size_t place) {
    rows += metadata(rank, tid, "thread_name", "\"name\":" + quoted(name));
    rows += metadata(rank, tid, "thread_sort_index", "\"sort_index\":" + std::to_string(place));
  };
  for (size_t t = 0; t < tracks_.size(); ++t)
    row(kFirstTrack + static_cast<int64_t>(t), tracks_[t].name, t);
  uint64_t lost = refused_.load(std::memory_order_relaxed);
  TimePoint complete_since{};  // all that ended later is there
  for (const auto& ring : rings_) {
    row(ring->thread, ring->name, tracks_.size() + static_cast<size_t>(ring->thread));
    lost += ring->lost();
    if (ring->lost() > 0) complete_since = std::max(complete_since, ring->at(ring->lost()).end);
    for (uint64_t i = ring->lost(); i < ring->written; ++i) {
      const TraceEvent& e = ring->at(i);
      if (e.track == 0)
        shown.push_back({&e, ring->thread, 0});
      else
        shown.push_back(
            {&e, kFirstTrack + static_cast<int64_t>(e.track) - 1, tracks_[e.track - 1].key});
    }
  }
  // In the order of their begins, the outer of two first.
  std::sort(shown.begin(), shown.end(), [](const Shown& a, const Shown& b) {
    return a.event->begin != b.event->begin ? a.event->begin < b.event->begin
                                            : a.event->end > b.event->end;
  });
  std::string text = metadata(
      rank, -1, "farandole",
      "\"run\":" + hexadecimal(identity_.run) + member("rank", std::to_string(rank)) +
          member("size", std::to_string(identity_.size)) +
          member("process", std::to_string(::getpid())) + member("host", quoted(identity_.host)) +
          member("tuning", quoted(identity_.tuning)) +
          member("events", std::to_string(shown.size())) + member("lost", std::to_string(lost)) +
          member("complete_since", microseconds(nanoseconds(complete_since))));
  text += metadata(rank, -1, "process_name",
                   "\"name\":" + quoted("rank " + std::to_string(rank) + " (" + identity_.host +
                                        ", pid " + std::to_string(::getpid()) + ")"));
  text += metadata(rank, -1, "process_sort_index", "\"sort_index\":" + std::to_string(rank));
  text += rows;
  for (const Shown& s : shown) text += lines_of(*s.event, rank, s.tid, s.key);
  return text;
}

}  // namespace farandole
