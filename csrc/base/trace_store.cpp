#include "base/trace_store.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstdio>
#include <cstring>
#include <vector>

#include "base/error.h"
#include "base/fixed_text.h"

namespace farandole {
namespace {

constexpr uint64_t kMagic = 0x66617261'74726330 + sizeof(TraceHead);
constexpr size_t kPage = 4096;
constexpr size_t kHeadBytes = (sizeof(TraceHead) + kPage - 1) / kPage * kPage;
constexpr size_t kRowBytes = Trace::kEventsPerThread * sizeof(TraceEvent);
constexpr size_t kBytes = kHeadBytes + Trace::kMostThreads * kRowBytes;

// Above any thread's number, of which Linux has at most 2^22.
constexpr int64_t kFirstTrack = 1'000'000'000;

constexpr std::array<const char*, 11> kKinds{"operation",  "phase",  "turn",  "wait",
                                             "final_wait", "parked", "ready", "step",
                                             "plan",       "user",   "device"};

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

/// The picture of one event; of an operation two: in its stream, and from launch to done.
std::string lines_of(const TraceEvent& e, int rank, int64_t tid, uint64_t key) {
  const std::string label = text_in(e.label);
  const std::string title = quoted(e.name[0] != 0 ? text_in(e.name) : label);
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
  if (e.kind == TraceKind::operation || e.kind == TraceKind::device) {
    argue("collective", quoted(label));
    argue("path", quoted(text_in(e.path)));
    argue(e.kind == TraceKind::device ? "ready" : "launched",
          microseconds(nanoseconds(e.launched)));
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

struct Shown {
  TraceEvent event;
  int64_t tid;
  uint64_t key;
};

struct Copied {
  uint64_t lost;     // so many of the row's events are gone
  uint64_t seen;     // how many there have been
  uint64_t damaged;  // of those that are there: left out, too
};

/// Whether its kind does not exist, or its times are before the clock began.
bool is_damaged(const TraceEvent& e) {
  return static_cast<size_t>(e.kind) >= kKinds.size() || nanoseconds(e.begin) < 0 ||
         nanoseconds(e.end) < 0;
}

/// The events of a row since its `from_event`th, whose thread may go on writing: those it
/// overwrites meanwhile are left out.
Copied copy_row(const TraceStore& store, size_t row, uint64_t from_event, bool still,
                std::vector<Shown>& into) {
  const TraceHead& head = store.head();
  const TraceHead::Row& from = head.row[row];
  const auto first_of = [](uint64_t written) {
    return written - std::min<uint64_t>(written, Trace::kEventsPerThread);
  };
  const uint64_t written = from.written.load(std::memory_order_acquire);  // partner: append
  const uint64_t first = std::max(from_event, first_of(written));
  const size_t begin = into.size();
  for (uint64_t i = first; i < written; ++i) {
    const TraceEvent& e = store.events(row)[i % Trace::kEventsPerThread];
    const bool own = e.track == 0 || e.track > TraceHead::kMostTracks;
    const int64_t tid = own ? from.thread : kFirstTrack + static_cast<int64_t>(e.track) - 1;
    into.push_back({e, tid, own ? 0 : head.track[e.track - 1].key});
  }
  std::atomic_thread_fence(std::memory_order_acquire);
  // One may be half written now, or for ever, in the place of the oldest.
  const uint64_t later = from.written.load(std::memory_order_relaxed);
  const uint64_t lost = first_of(still ? later : later + 1);
  const uint64_t torn = std::min(std::max(lost, first) - first, written - first);
  into.erase(into.begin() + static_cast<ptrdiff_t>(begin),
             into.begin() + static_cast<ptrdiff_t>(begin + torn));
  const auto damaged = std::remove_if(into.begin() + static_cast<ptrdiff_t>(begin), into.end(),
                                      [](const Shown& s) { return is_damaged(s.event); });
  const auto count = static_cast<uint64_t>(into.end() - damaged);
  into.erase(damaged, into.end());
  return {std::max(lost, first_of(written)), written, count};
}

// ---- the rows of the picture ----

std::string about_process(const TraceHead& head) {
  const std::string name = "rank " + std::to_string(head.rank) + " (" + text_in(head.host) +
                           ", pid " + std::to_string(head.process) + ")";
  return metadata(head.rank, -1, "process_name", "\"name\":" + quoted(name)) +
         metadata(head.rank, -1, "process_sort_index",
                  "\"sort_index\":" + std::to_string(head.rank));
}

std::string about_row(const TraceHead& head, int64_t tid, const std::string& name, size_t place) {
  return metadata(head.rank, tid, "thread_name", "\"name\":" + quoted(name)) +
         metadata(head.rank, tid, "thread_sort_index", "\"sort_index\":" + std::to_string(place));
}

std::string about_track(const TraceHead& head, uint32_t track) {
  return about_row(head, kFirstTrack + track, text_in(head.track[track].name), track);
}

std::string about_thread(const TraceHead& head, uint32_t row) {
  const int64_t thread = head.row[row].thread;
  return about_row(head, thread, text_in(head.row[row].name),
                   TraceHead::kMostTracks + static_cast<size_t>(thread));
}

}  // namespace

TraceStore::TraceStore(const Trace::Identity& identity)
    : path_(identity.directory + "/.rank-" + std::to_string(identity.rank) + ".events") {
  ::unlink(path_.c_str());
  file_ =
      Fd(checked(::open(path_.c_str(), O_RDWR | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600),
                 "open " + path_));
  try {
    struct flock lock{};  // of this process, not of children that inherit the descriptor
    lock.l_type = F_WRLCK;
    checked(::fcntl(file_.get(), F_SETLK, &lock), "locking " + path_);
    checked(::ftruncate(file_.get(), kBytes), "ftruncate of " + path_);
    errno = ::posix_fallocate(file_.get(), 0, kHeadBytes);  // else a full disk is a SIGBUS later
    checked(errno == 0 ? 0 : -1, "writing " + path_);
    map(file_.get(), PROT_READ | PROT_WRITE);
  } catch (const Error&) {
    ::unlink(path_.c_str());
    throw;
  }
  TraceHead& h = *head_;
  h.magic = kMagic;
  h.run = identity.run;
  h.rank = identity.rank;
  h.size = identity.size;
  h.process = ::getpid();
  copy_cut(identity.host, h.host);
  copy_cut(identity.tuning, h.tuning);
}

TraceStore::TraceStore(const std::string& path)
    : path_(path),
      file_(checked(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC), "open " + path)) {
  struct stat status{};
  checked(::fstat(file_.get(), &status), "fstat of " + path);
  if (static_cast<size_t>(status.st_size) == kBytes) map(file_.get(), PROT_READ);
  if (head_ == nullptr || head_->magic != kMagic || head_->rows > Trace::kMostThreads ||
      head_->tracks > TraceHead::kMostTracks)
    throw Error(ErrorCode::resource, path + " holds no events of this version of farandole");
}

TraceStore::TraceStore(const TraceStore& own) : path_(own.path_) {
  map(own.file_.get(), PROT_READ);
}

void TraceStore::map(int file, int protection) {
  void* base = ::mmap(nullptr, kBytes, protection, MAP_SHARED | MAP_NORESERVE, file, 0);
  if (base == MAP_FAILED) throw_errno("mmap of " + path_);
  head_ = static_cast<TraceHead*>(base);
  events_ = reinterpret_cast<TraceEvent*>(static_cast<std::byte*>(base) + kHeadBytes);
}

TraceStore::~TraceStore() {
  if (head_ != nullptr) ::munmap(head_, events_ != nullptr ? kBytes : kHeadBytes);
}

bool TraceStore::reserve(size_t row) const {
  const auto at = static_cast<off_t>(kHeadBytes + row * kRowBytes);
  return ::posix_fallocate(file_.get(), at, static_cast<off_t>(kRowBytes)) == 0;
}

void TraceStore::unlink() {
  if (!path_.empty()) ::unlink(path_.c_str());
  path_.clear();
}

void TraceStore::let_go() {
  ::madvise(events_, kBytes - kHeadBytes, MADV_REMOVE);  // children may have it mapped, too
  ::munmap(events_, kBytes - kHeadBytes);
  events_ = nullptr;
  file_.reset();
}

std::string TraceStore::part_name() const {
  return "rank-" + std::to_string(head_->rank) + ".jsonl";
}

std::string TraceStore::part(bool still) const {
  const int rank = head_->rank;
  const uint32_t rows_there = head_->rows.load(std::memory_order_acquire);
  const uint32_t tracks_there = head_->tracks.load(std::memory_order_acquire);
  std::string rows;
  for (uint32_t t = 0; t < tracks_there; ++t) rows += about_track(*head_, t);
  std::vector<Shown> shown;
  uint64_t lost = head_->refused.load(std::memory_order_relaxed);
  TimePoint complete_since{};  // all that ended later is there
  for (uint32_t r = 0; r < rows_there; ++r) {
    rows += about_thread(*head_, r);
    const auto [gone, seen, damaged] = copy_row(*this, r, 0, still, shown);
    lost += gone + damaged;
    if (gone > 0)
      complete_since = std::max(complete_since, events(r)[gone % Trace::kEventsPerThread].end);
  }
  // In the order of their begins, the outer of two first.
  std::sort(shown.begin(), shown.end(), [](const Shown& a, const Shown& b) {
    return a.event.begin != b.event.begin ? a.event.begin < b.event.begin
                                          : a.event.end > b.event.end;
  });
  const std::string host = text_in(head_->host);
  const std::string process = std::to_string(head_->process);
  std::string text = metadata(
      rank, -1, "farandole",
      "\"run\":" + hexadecimal(head_->run) + member("rank", std::to_string(rank)) +
          member("size", std::to_string(head_->size)) + member("process", process) +
          member("host", quoted(host)) + member("tuning", quoted(text_in(head_->tuning))) +
          member("events", std::to_string(shown.size())) + member("lost", std::to_string(lost)) +
          member("complete_since", microseconds(nanoseconds(complete_since))));
  text += about_process(*head_);
  text += rows;
  for (const Shown& s : shown) text += lines_of(s.event, rank, s.tid, s.key);
  return text;
}

// ---- what a rank records now ----

TraceFollower::TraceFollower(const std::string& events_file) : store_(events_file) {}
TraceFollower::TraceFollower(const Trace& own) : store_(own.store()) {}

std::string TraceFollower::host() const { return text_in(store_.head().host); }

std::string TraceFollower::more() {
  const TraceHead& head = store_.head();
  const uint32_t rows_there = head.rows.load(std::memory_order_acquire);
  std::string text = introduced_ ? "" : about_process(head);
  introduced_ = true;
  std::vector<Shown> shown;
  for (uint32_t r = 0; r < rows_there; ++r) {
    if (r >= rows_) text += about_thread(head, r);
    seen_[r] = copy_row(store_, r, seen_[r], false, shown).seen;
  }
  rows_ = rows_there;
  // After the events: whatever track they name is there.
  const uint32_t tracks_there = head.tracks.load(std::memory_order_acquire);
  for (; tracks_ < tracks_there; ++tracks_) text += about_track(head, tracks_);
  // A rank that stops gives its memory back, which then reads as nothing.
  for (const Shown& s : shown)
    if (s.event.end != TimePoint{}) text += lines_of(s.event, head.rank, s.tid, s.key);
  return text;
}

// ---- files ----

namespace {
void write_all(int fd, std::string_view text, const std::string& name) {
  while (!text.empty()) {
    const ssize_t n = ::write(fd, text.data(), text.size());
    if (n < 0 && errno == EINTR) continue;
    text.remove_prefix(static_cast<size_t>(checked(n, "write " + name)));
  }
}

/// Its rank holds a lock on it until it has ended.
bool is_locked(const std::string& path) {
  const Fd file(::open(path.c_str(), O_RDWR | O_NOFOLLOW | O_CLOEXEC));
  struct flock lock{};
  lock.l_type = F_WRLCK;
  return file && ::fcntl(file.get(), F_GETLK, &lock) == 0 && lock.l_type != F_UNLCK;
}
}  // namespace

void write_trace_file(const std::string& directory, const std::string& name,
                      const std::string& text) {
  const std::string path = directory + "/" + name;
  const std::string beside = directory + "/." + name + "." + std::to_string(::getpid());
  ::unlink(beside.c_str());
  const Fd file(
      checked(::open(beside.c_str(), O_WRONLY | O_CREAT | O_EXCL | O_NOFOLLOW | O_CLOEXEC, 0600),
              "open " + beside));
  try {
    write_all(file.get(), text, beside);
    checked(::rename(beside.c_str(), path.c_str()), "rename to " + path);
  } catch (const Error&) {
    ::unlink(beside.c_str());
    throw;
  }
}

bool recover_trace_part(const std::string& events_file, bool living) {
  const bool lives = is_locked(events_file);
  if (lives && !living) return false;
  TraceStore store(events_file);
  const size_t slash = events_file.rfind('/');
  const std::string folder = slash == std::string::npos ? "." : events_file.substr(0, slash);
  write_trace_file(folder, store.part_name(), store.part(false));
  if (lives) return true;
  // As old as its run: the newest part says which run a directory is of.
  struct stat status{};
  if (::fstat(store.file(), &status) == 0) {
    const timespec times[2]{status.st_mtim, status.st_mtim};
    ::utimensat(AT_FDCWD, (folder + "/" + store.part_name()).c_str(), times, 0);
  }
  store.unlink();
  return true;
}

}  // namespace farandole
