#include "transport/segment.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <fstream>
#include <new>
#include <string>

#include "base/error.h"
#include "base/wire.h"

namespace farandole {
namespace {

constexpr uint64_t kMagic = 0x66617261'6e646f34;  // "farando4": changes with the layout
constexpr size_t kPage = 4096;
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

struct Header {
  uint64_t magic;
  uint64_t ranks;
  uint64_t arena_bytes;
  std::byte secret[32];
};

size_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }
size_t page_bytes() { return round_up(sizeof(RankPage), kPage); }
size_t arenas_begin(int ranks) { return kPage + static_cast<size_t>(ranks) * page_bytes(); }

Error out_of_arena(size_t need, size_t have) {
  return Error(ErrorCode::resource,
               "the shared arena of this rank cannot hold " + std::to_string(need) +
                   " bytes more; its largest free piece has " + std::to_string(have),
               {}, "release allocate()d arrays, or raise FARANDOLE_ARENA_BYTES");
}

/// Bytes that this process has mapped.
size_t bytes_mapped() {
  size_t pages = 0;
  std::ifstream("/proc/self/statm") >> pages;
  return pages * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
}

constexpr size_t kMiB = size_t{1} << 20;
constexpr size_t kLeastArena = 16 * kMiB;
// A quarter of what x86-64 and AArch64 give a process: while a world is replaced there are two.
constexpr size_t kAddresses = size_t{1} << 45;

/// A resource limit of this process that the segment counts to.
struct Limit {
  const char* name;  // as the shell's ulimit calls it
  size_t bytes = 0;
  size_t left = 0;
};

std::optional<Limit> limit_of(decltype(RLIMIT_AS) which, const char* name, size_t used) {
  rlimit limit{};
  if (::getrlimit(which, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY) return std::nullopt;
  return Limit{name, limit.rlim_cur, limit.rlim_cur - std::min<size_t>(used, limit.rlim_cur)};
}

std::optional<Limit> limit_of_files() { return limit_of(RLIMIT_FSIZE, "-f", 0); }
std::optional<Limit> limit_of_addresses() { return limit_of(RLIMIT_AS, "-v", bytes_mapped()); }

/// The size of arenas, one for each rank, that fit into `left` bytes of address space. A quarter
/// stays for threads' stacks and for what the program maps later.
size_t arena_within(size_t left, int ranks) {
  const size_t room = left / 4 * 3, begin = arenas_begin(ranks);
  return room > begin ? (room - begin) / static_cast<size_t>(ranks) / kMiB * kMiB : 0;
}

/// Says how much a limit leaves to the segment, and which arena fits; empty if there is no limit.
std::string said_of(const std::optional<Limit>& limit, int ranks) {
  if (!limit) return "";
  const size_t arena = arena_within(limit->left, ranks);
  return std::string(", and ulimit ") + limit->name + " (" + std::to_string(limit->bytes / kMiB) +
         " MiB) leaves " + std::to_string(limit->left / kMiB) + " MiB; " +
         (arena < kLeastArena ? std::string("raise it")
                              : "FARANDOLE_ARENA_BYTES=" + std::to_string(arena / kMiB) + "M fits");
}

/// The memory, in bytes, of the machine, or of this process' cgroup (version 2) where it has less.
size_t memory_here() {
  size_t least =
      static_cast<size_t>(::sysconf(_SC_PHYS_PAGES)) * static_cast<size_t>(::sysconf(_SC_PAGESIZE));
  std::ifstream groups("/proc/self/cgroup");
  std::string line, group;
  while (std::getline(groups, line))
    if (line.starts_with("0::/")) group = line.substr(3);
  for (;; group.erase(group.rfind('/'))) {  // a group's limit holds for the groups in it
    size_t most = 0;                        // "max" is no number
    if (std::ifstream("/sys/fs/cgroup" + group + "/memory.max") >> most && most > 0)
      least = std::min(least, most);
    if (group.empty()) return least;
  }
}

/// The segment takes address space, and memory only as that is used, so only a limit can refuse it.
[[noreturn]] void refuse_size(std::string_view call, size_t bytes, const std::string& said) {
  throw Error(ErrorCode::resource,
              errno_error(call).verdict() + "; an arena for each rank takes " +
                  std::to_string(bytes / kMiB) + " MiB of address space" + said,
              {}, "lower FARANDOLE_ARENA_BYTES, or raise the limit");
}

}  // namespace

size_t default_arena_bytes(int ranks) {
  size_t arena = std::min(memory_here(), arena_within(kAddresses, ranks));
  for (const auto& limit : {limit_of_files(), limit_of_addresses()})
    if (limit) arena = std::min(arena, arena_within(limit->left, ranks));
  return std::max(arena, kLeastArena);
}

std::shared_ptr<Segment> Segment::create(int ranks, size_t arena_bytes,
                                         const std::optional<Key>& secret) {
  arena_bytes = round_up(arena_bytes, kPage);
  Fd memory(checked(::memfd_create("farandole", MFD_CLOEXEC | MFD_ALLOW_SEALING), "memfd_create"));
  const size_t bytes = arenas_begin(ranks) + static_cast<size_t>(ranks) * arena_bytes;
  if (::ftruncate(memory.get(), static_cast<off_t>(bytes)) != 0)
    refuse_size("ftruncate of the shared segment", bytes, said_of(limit_of_files(), ranks));
  checked(::fcntl(memory.get(), F_ADD_SEALS, kSeals), "sealing the shared segment");
  Header header{kMagic, static_cast<uint64_t>(ranks), arena_bytes, {}};
  if (secret)
    std::ranges::copy(*secret, header.secret);
  else
    fill_with_random_bytes(header.secret);
  checked(::pwrite(memory.get(), &header, sizeof header, 0), "writing the segment's header");
  return std::shared_ptr<Segment>(new Segment(std::move(memory), ranks, arena_bytes));
}

std::shared_ptr<Segment> Segment::attach(Fd memory) {
  const int seals = checked(::fcntl(memory.get(), F_GET_SEALS), "reading the segment's seals");
  struct stat status{};
  checked(::fstat(memory.get(), &status), "fstat of the shared segment");
  Header header{};
  const auto got = ::pread(memory.get(), &header, sizeof header, 0);
  const auto size = static_cast<uint64_t>(status.st_size);
  if ((seals & kSeals) != kSeals || got != sizeof header || header.magic != kMagic ||
      header.ranks == 0 || header.ranks > kMostRanks || header.arena_bytes % kPage != 0 ||
      size != arenas_begin(static_cast<int>(header.ranks)) + header.ranks * header.arena_bytes)
    throw Error(ErrorCode::version_mismatch, "the shared segment is not of this version's format");
  return std::shared_ptr<Segment>(
      new Segment(std::move(memory), static_cast<int>(header.ranks), header.arena_bytes));
}

Segment::Segment(Fd memory, int ranks, size_t arena_bytes)
    : memory_(std::move(memory)),
      ranks_(ranks),
      arena_bytes_(arena_bytes),
      arenas_begin_(arenas_begin(ranks)),
      bytes_(arenas_begin_ + static_cast<size_t>(ranks) * arena_bytes) {
  void* base =
      ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED | MAP_NORESERVE, memory_.get(), 0);
  if (base == MAP_FAILED)
    refuse_size("mmap of the shared segment", bytes_, said_of(limit_of_addresses(), ranks));
  base_ = static_cast<std::byte*>(base);
  ::madvise(base_, bytes_, MADV_DONTDUMP);  // a core file of the whole host helps nobody
  for (int r = 0; r < ranks_; ++r) pages_.push_back(&mapped_page(r));
}

RankPage& Segment::mapped_page(int rank) const {
  std::byte* const at = base_ + kPage + static_cast<size_t>(rank) * page_bytes();
  return *std::launder(reinterpret_cast<RankPage*>(at));
}

Segment::~Segment() {
  ::munmap(base_, bytes_);
  for (void* page : apart_) ::munmap(page, page_bytes());
}

void Segment::set_apart(int rank) {
  void* page = ::mmap(nullptr, page_bytes(), PROT_READ | PROT_WRITE,
                      MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (page == MAP_FAILED) throw_errno("mmap of a page for a rank elsewhere");
  apart_.push_back(page);
  pages_[static_cast<size_t>(rank)] = new (page) RankPage;
}

RankState Segment::state_of(int rank) const {
  return static_cast<RankState>(page(rank).state.value.load(std::memory_order_acquire));
}

void Segment::show_state(int rank, RankState state) const {
  page(rank).state.value.store(static_cast<uint64_t>(state), std::memory_order_release);
}

std::span<const std::byte, 32> Segment::secret() const {
  return std::span(std::launder(reinterpret_cast<const Header*>(base_))->secret);
}

void Segment::show_address(int rank, std::span<const std::byte> address) const {
  ShownAddress& shown = page(rank).address;
  if (address.empty() || address.size() > sizeof shown.text)
    throw Error(ErrorCode::internal, "a transport's address does not fit its place");
  std::ranges::copy(address, shown.text);
  shown.bytes.store(address.size(), std::memory_order_release);  // partner: address_of
}

std::vector<std::byte> Segment::address_of(int rank) const {
  const ShownAddress& shown = page(rank).address;
  const uint64_t bytes = shown.bytes.load(std::memory_order_acquire);
  return {shown.text, shown.text + std::min<uint64_t>(bytes, sizeof shown.text)};
}

std::span<std::byte> Segment::arena(int rank) const {
  return {base_ + arenas_begin_ + static_cast<size_t>(rank) * arena_bytes_, arena_bytes_};
}

std::optional<uint64_t> Segment::offset_of(const void* data, size_t bytes) const {
  const auto begin = reinterpret_cast<uintptr_t>(base_) + arenas_begin_;
  const auto end = reinterpret_cast<uintptr_t>(base_) + bytes_;
  const auto at = reinterpret_cast<uintptr_t>(data);
  if (at < begin || at > end || bytes > end - at) return std::nullopt;
  return at - reinterpret_cast<uintptr_t>(base_);
}

bool Segment::has(uint64_t offset, size_t bytes) const {
  return offset >= arenas_begin_ && offset <= bytes_ && bytes <= bytes_ - offset;
}

std::byte* Segment::at(uint64_t offset, size_t bytes) const {
  if (!has(offset, bytes))
    WireReader::malformed("offset " + std::to_string(offset) + " of " + std::to_string(bytes) +
                          " bytes in shared memory");
  return base_ + offset;
}

// ---- directory: the owner writes, everybody reads ----

DirectoryEntry* Segment::entry(int rank, uint64_t key) const {
  for (DirectoryEntry& e : page(rank).directory)
    if (e.key.load() == key) return &e;
  return nullptr;
}

std::optional<uint64_t> Segment::find(int rank, uint64_t key) const {
  const DirectoryEntry* e = entry(rank, key);
  if (e == nullptr) return std::nullopt;
  const uint64_t offset = e->offset.load();
  const auto state = static_cast<EntryState>(e->state.load());
  // The same key still: neither was written for another one (partner: publish).
  if (e->key.load() != key || state == EntryState::withdrawn) return std::nullopt;
  return offset;
}

bool Segment::listed(int rank, uint64_t key) const { return entry(rank, key) != nullptr; }

namespace {
bool is_open(const DirectoryEntry& e) {
  return static_cast<EntryState>(e.state.load()) == EntryState::open;
}
}  // namespace

bool Segment::closed(int rank, uint64_t key) const {
  if (state_of(rank) == RankState::gone) return true;  // partner: Engine::~Engine
  const DirectoryEntry* e = entry(rank, key);
  return e == nullptr || !is_open(*e);
}

bool Segment::has_closed(int rank, uint64_t key) const {
  const DirectoryEntry* e = entry(rank, key);
  return e != nullptr && !is_open(*e);
}

/// A place never used, or withdrawn by its last user.
DirectoryEntry* Segment::place_for(int rank, uint64_t key) {
  const auto withdrawn = [](const DirectoryEntry& e) {
    return static_cast<EntryState>(e.state.load()) == EntryState::withdrawn;
  };
  if (DirectoryEntry* same = entry(rank, key); same != nullptr && withdrawn(*same)) return same;
  for (size_t i = 0; i < kDirectoryEntries; ++i) {
    DirectoryEntry& e = page(rank).directory[(next_place_ + i) % kDirectoryEntries];
    if (e.key.load() != 0 && !withdrawn(e)) continue;
    next_place_ = (next_place_ + i + 1) % kDirectoryEntries;
    return &e;
  }
  throw Error(ErrorCode::resource,
              "this rank has no room for another stream; " + std::to_string(kDirectoryEntries) +
                  " are in use",
              {}, "close groups and optimizers that are no longer needed");
}

void Segment::publish(int rank, uint64_t key, uint64_t offset) {
  const std::lock_guard lock(publishing_);
  DirectoryEntry* e = place_for(rank, key);
  e->key.store(0);
  e->offset.store(offset);
  e->state.store(static_cast<uint64_t>(EntryState::open));
  e->key.store(key);
}

void Segment::close(int rank, uint64_t key) {
  if (!memory_) return;  // a forked child: the page is its parent's
  const std::lock_guard lock(publishing_);
  if (DirectoryEntry* e = entry(rank, key))
    e->state.store(static_cast<uint64_t>(EntryState::closed));
}

void Segment::withdraw(int rank, uint64_t key) {
  const std::lock_guard lock(publishing_);
  if (DirectoryEntry* e = entry(rank, key))
    e->state.store(static_cast<uint64_t>(EntryState::withdrawn));
}

void Segment::hide_from_children() { ::madvise(base_, arenas_begin_, MADV_DONTFORK); }

// ---- arena ----

Arena::Arena(std::shared_ptr<Segment> segment, int rank)
    : segment_(std::move(segment)), owner_(::getpid()), memory_(segment_->arena(rank)) {
  free_[0] = memory_.size();
}

std::byte* Arena::allocate(size_t bytes) {
  const size_t need = round_up(bytes == 0 ? 1 : bytes, kPage);
  const std::lock_guard lock(mutex_);
  size_t largest = 0;
  for (auto it = free_.begin(); it != free_.end(); ++it) {
    const auto [offset, have] = *it;
    largest = std::max(largest, have);
    if (have < need) continue;
    free_.erase(it);
    if (have > need) free_[offset + need] = have - need;
    used_[offset] = need;
    in_use_ += need;
    ++allocations_;
    return memory_.data() + offset;
  }
  throw out_of_arena(need, largest);
}

void Arena::release(std::byte* data) {
  if (::getpid() != owner_) return;  // a forked child drops its parent's array, which lives on
  const std::lock_guard lock(mutex_);
  const auto it = used_.find(static_cast<size_t>(data - memory_.data()));
  if (it == used_.end()) return;
  auto [offset, bytes] = *it;
  used_.erase(it);
  in_use_ -= bytes;
  ::madvise(data, bytes, MADV_REMOVE);  // zero again, and the pages go back to the system
  auto next = free_.lower_bound(offset);
  if (next != free_.end() && offset + bytes == next->first) {
    bytes += next->second;
    next = free_.erase(next);
  }
  if (next != free_.begin()) {
    const auto before = std::prev(next);
    if (before->first + before->second == offset) {
      before->second += bytes;
      return;
    }
  }
  free_[offset] = bytes;
}

size_t Arena::bytes_in_use() const {
  const std::lock_guard lock(mutex_);
  return in_use_;
}

size_t Arena::allocations() const {
  const std::lock_guard lock(mutex_);
  return allocations_;
}

}  // namespace farandole
