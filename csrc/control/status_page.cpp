#include "control/status_page.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstddef>
#include <cstring>
#include <new>
#include <utility>

#include "base/fixed_text.h"
#include "base/log.h"
#include "transport/wait_board.h"

namespace farandole {
namespace {

constexpr const char* kFile = "farandole-status";  // python/farandole/_live/pages.py looks for it

template <typename Record, typename Fill>
void write(Record& record, Fill fill) {
  const uint64_t version = record.version.load(std::memory_order_relaxed);
  record.version.store(version + 1, std::memory_order_relaxed);
  std::atomic_thread_fence(std::memory_order_release);  // partner: a reader in another process
  fill(record);
  record.version.store(version + 2, std::memory_order_release);
}

template <size_t N>
void put(std::string_view text, std::array<std::atomic<char>, N>& into) {
  const std::string_view fitting = cut(text, N);
  for (size_t i = 0; i < fitting.size(); ++i) into[i].store(fitting[i], std::memory_order_relaxed);
  into[fitting.size()].store(0, std::memory_order_relaxed);
}

}  // namespace

struct StatusPage::Layout {
  // Records that are read whole: a version is odd while its record is written, and grows.
  struct ShownWait {
    std::atomic<uint64_t> version{0};
    std::atomic<int64_t> since{0};
    std::array<std::atomic<int16_t>, Wait::kRanks> ranks{};  // -1 behind the last
    std::array<std::atomic<char>, 192> title{};
  };
  struct ShownVerdict {
    std::atomic<uint64_t> version{0};
    std::array<std::atomic<char>, 512> text{};
  };

  char fields[1024] = {};  // a line of each: its name, its format (Python's struct), its offset
  int64_t pid = 0, joined = 0;  // the latter by the wall clock; other times by the steady one
  int32_t rank = 0, size = 0;
  char job[256] = {};
  char host[256] = {};
  std::atomic<uint64_t> state{0}, operations{0}, bytes{0}, steps{0};
  std::atomic<int64_t> stepped{0}, for_ranks{0}, for_data{0};
  ShownWait wait;
  ShownVerdict verdict;
};

namespace {

struct Field {
  const char* name;
  const char* format;
  size_t offset;
};

template <typename Layout>
std::string table_of_fields() {
  using ShownWait = typename Layout::ShownWait;
  using ShownVerdict = typename Layout::ShownVerdict;
  const Field fields[] = {
      {"pid", "q", offsetof(Layout, pid)},
      {"joined", "q", offsetof(Layout, joined)},
      {"rank", "i", offsetof(Layout, rank)},
      {"size", "i", offsetof(Layout, size)},
      {"job", "256s", offsetof(Layout, job)},
      {"host", "256s", offsetof(Layout, host)},
      {"state", "Q", offsetof(Layout, state)},
      {"operations", "Q", offsetof(Layout, operations)},
      {"bytes", "Q", offsetof(Layout, bytes)},
      {"steps", "Q", offsetof(Layout, steps)},
      {"stepped", "q", offsetof(Layout, stepped)},
      {"for_ranks", "q", offsetof(Layout, for_ranks)},
      {"for_data", "q", offsetof(Layout, for_data)},
      {"wait.version", "Q", offsetof(Layout, wait) + offsetof(ShownWait, version)},
      {"wait.since", "q", offsetof(Layout, wait) + offsetof(ShownWait, since)},
      {"wait.ranks", "16h", offsetof(Layout, wait) + offsetof(ShownWait, ranks)},
      {"wait.title", "192s", offsetof(Layout, wait) + offsetof(ShownWait, title)},
      {"verdict.version", "Q", offsetof(Layout, verdict) + offsetof(ShownVerdict, version)},
      {"verdict.text", "512s", offsetof(Layout, verdict) + offsetof(ShownVerdict, text)},
  };
  std::string text = "farandole status\n";
  for (const Field& field : fields)
    text +=
        std::string(field.name) + ' ' + field.format + ' ' + std::to_string(field.offset) + '\n';
  return text;
}

}  // namespace

StatusPage::StatusPage(const StatusOwner& owner) : file_(::memfd_create(kFile, MFD_CLOEXEC)) {
  void* memory = MAP_FAILED;
  if (file_ && ::ftruncate(file_.get(), sizeof(Layout)) == 0)
    memory = ::mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_SHARED, file_.get(), 0);
  if (memory == MAP_FAILED) {
    log(LogLevel::info, "this rank's counters cannot be seen from outside: " +
                            errno_error("a file in memory").verdict());
    file_.reset();
    memory =
        ::mmap(nullptr, sizeof(Layout), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (memory == MAP_FAILED) throw_errno("mmap");
  }
  ::madvise(memory, sizeof(Layout), MADV_DONTDUMP);  // as all that is shown to others
  page_ = new (memory) Layout;
  page_->pid = ::getpid();
  page_->joined = std::chrono::system_clock::now().time_since_epoch() / std::chrono::nanoseconds(1);
  page_->rank = owner.rank;
  page_->size = owner.size;
  copy_cut(owner.job, page_->job);
  copy_cut(owner.host, page_->host);
  copy_cut(table_of_fields<Layout>(), page_->fields);  // last: it makes the page one
}

StatusPage::~StatusPage() { ::munmap(page_, sizeof(Layout)); }

// One thread at a time writes these: a sum needs no exchange.
void StatusPage::show_ended(uint64_t operations, uint64_t bytes) {
  page_->operations.store(operations, std::memory_order_relaxed);
  page_->bytes.store(bytes, std::memory_order_relaxed);
}

void StatusPage::add_wait(WaitKind kind, Duration length) {
  std::atomic<int64_t>& sum = kind == WaitKind::for_ranks ? page_->for_ranks : page_->for_data;
  sum.store(sum.load(std::memory_order_relaxed) + length.count(), std::memory_order_relaxed);
}

void StatusPage::show_wait(TimePoint since, std::string_view title,
                           std::span<const uint16_t> ranks) {
  write(page_->wait, [&](Layout::ShownWait& shown) {
    shown.since.store(since.time_since_epoch().count(), std::memory_order_relaxed);
    for (size_t i = 0; i < shown.ranks.size(); ++i)
      shown.ranks[i].store(i < ranks.size() ? static_cast<int16_t>(ranks[i]) : int16_t{-1},
                           std::memory_order_relaxed);
    put(title, shown.title);
  });
  shows_wait_ = true;
}

void StatusPage::end_wait() {
  if (!std::exchange(shows_wait_, false)) return;
  write(page_->wait,
        [](Layout::ShownWait& shown) { shown.since.store(0, std::memory_order_relaxed); });
}

void StatusPage::show_verdict(const Error& error) {
  write(page_->verdict, [&](Layout::ShownVerdict& shown) { put(error.verdict(), shown.text); });
}

void StatusPage::count_step(TimePoint end) {
  page_->steps.fetch_add(1, std::memory_order_relaxed);
  page_->stepped.store(end.time_since_epoch().count(), std::memory_order_relaxed);
}

void StatusPage::show_state(RankState state) {
  page_->state.store(static_cast<uint64_t>(state), std::memory_order_relaxed);
}

std::string StatusPage::bytes() const {
  std::string copy(sizeof(Layout), '\0');
  if (!file_)
    std::memcpy(copy.data(), page_, sizeof(Layout));
  else if (::pread(file_.get(), copy.data(), copy.size(), 0) != static_cast<ssize_t>(copy.size()))
    throw_errno("pread");
  return copy;
}

}  // namespace farandole
