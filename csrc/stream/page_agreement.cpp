#include "stream/page_agreement.h"

#include <new>
#include <utility>

#include "stream/agreement_messages.h"

namespace farandole {
namespace {

constexpr auto kFresh = std::chrono::seconds(1);  // a rank that waits looks around more often

}  // namespace

PageAgreement::PageAgreement(StreamMemory& memory, Arena& arena, uint64_t key,
                             uint32_t first_sequence)
    : memory_(memory), arena_(arena), key_(key) {
  std::byte* page = arena_.allocate(sizeof(StreamPage) + cico_bytes(memory_.size()));
  memory_.pages[static_cast<size_t>(memory_.rank)] = new (page) StreamPage(first_sequence);
  memory_.segment->publish(world_rank(), key_, *memory_.segment->offset_of(page, 1));
}

PageAgreement::~PageAgreement() {
  // The page itself is given back when all peers have closed theirs (Engine::sweep).
  memory_.segment->close(world_rank(), key_);
}

std::optional<ClosedPage> PageAgreement::leave_behind() const {
  ClosedPage page{key_, reinterpret_cast<std::byte*>(&memory_.mine()), {}};
  for (int r = 0; r < memory_.size(); ++r)
    if (r != memory_.rank)
      page.readers.push_back({memory_.members[static_cast<size_t>(r)], has_opened(r)});
  return page;
}

// ---- the life of an operation ----

/// Peers open the stream when they come to it; until then their pages are not to be found.
bool PageAgreement::open() {
  if (open_) return true;
  open_ = true;
  for (size_t r = 0; r < memory_.pages.size(); ++r) {
    if (memory_.pages[r] != nullptr) continue;
    const auto offset = memory_.segment->find(memory_.members[r], key_);
    if (offset)
      memory_.pages[r] = std::launder(reinterpret_cast<StreamPage*>(
          taken("the place of a stream", memory_.members[r], world_rank(), [&] {
            return memory_.segment->at(*offset, sizeof(StreamPage) + cico_bytes(memory_.size()));
          })));
    else
      open_ = false;  // the others are looked for nevertheless: a warning names the late
  }
  return open_;
}

void PageAgreement::post(uint64_t ticket, std::span<const std::byte>) {
  memory_.mine().entry.posted.store(ticket, std::memory_order_release);
}

void PageAgreement::complete(uint32_t sequence) {
  publish(memory_.mine().completed, progress(sequence, 0));
}

/// The arrays can be any number, so they do not fit into the page.
void PageAgreement::describe(const Descriptor& mine, std::span<const BundledArray> arrays) {
  Descriptor& shown = memory_.mine().descriptor;
  shown = mine;
  if (!arrays.empty()) {
    shown_arrays_ = arena_.allocate(arrays.size_bytes());
    std::memcpy(shown_arrays_, arrays.data(), arrays.size_bytes());
    shown.arrays_at = *memory_.segment->offset_of(shown_arrays_, arrays.size_bytes());
  }
  publish(memory_.mine().described, progress(memory_.sequence(), 0));
}

bool PageAgreement::all_reached(Word StreamPage::* stage) const {
  const uint64_t target = progress(memory_.sequence(), 0);
  return std::ranges::all_of(memory_.pages,
                             [&](const StreamPage* page) { return reached(page->*stage, target); });
}

std::optional<std::vector<Shown>> PageAgreement::described() {
  if (!all_reached(&StreamPage::described)) return std::nullopt;
  std::vector<Shown> all;
  for (int r = 0; r < memory_.size(); ++r)
    all.push_back(taken("the description of an operation", memory_.members[static_cast<size_t>(r)],
                        world_rank(), [&] { return shown_by(r); }));
  publish(memory_.mine().compared, progress(memory_.sequence(), 0));
  return all;
}

Shown PageAgreement::shown_by(int r) const {
  Shown shown{memory_.page(r).descriptor, {}};
  check_fields(shown.descriptor);
  const uint64_t count = shown.descriptor.bundled();
  if (count == 0) return shown;
  if (count > kMostBundled) WireReader::malformed(std::to_string(count) + " arrays of a call");
  const std::byte* there =
      memory_.segment->at(shown.descriptor.arrays_at, count * sizeof(BundledArray));
  shown.arrays.resize(count);
  std::memcpy(shown.arrays.data(), there, count * sizeof(BundledArray));
  for (const BundledArray& array : shown.arrays) check_fields(array);
  return shown;
}

bool PageAgreement::settled() {
  if (!all_reached(&StreamPage::compared)) return false;
  if (shown_arrays_ != nullptr) arena_.release(std::exchange(shown_arrays_, nullptr));
  return true;
}

// ---- what is known of the others ----

std::optional<uint32_t> PageAgreement::begun(int r) const {
  const StreamPage* page = page_of(r);
  if (page == nullptr) return std::nullopt;
  return static_cast<uint32_t>(page->entry.posted.load(std::memory_order_acquire) >> 32);
}

std::optional<uint32_t> PageAgreement::completed(int r) const {
  const StreamPage* page = page_of(r);
  if (page == nullptr) return std::nullopt;
  return static_cast<uint32_t>(page->completed.value.load(std::memory_order_acquire) >> 32);
}

bool PageAgreement::has_closed(int r) const {
  return memory_.segment->has_closed(memory_.members[static_cast<size_t>(r)], memory_.fate);
}

std::vector<int> PageAgreement::silent() const {
  const uint64_t target = progress(memory_.sequence(), 0);
  Word StreamPage::* const stage =
      reached(memory_.mine().compared, target) ? &StreamPage::compared : &StreamPage::described;
  return all_but(memory_, [&](int r) { return reached(memory_.page(r).*stage, target); });
}

bool PageAgreement::is_inside(int r) const {
  const StreamPage* page = page_of(r);
  return page != nullptr && page->inside.value.load(std::memory_order_seq_cst) != 0;  // Visit
}

void PageAgreement::show_holdups(std::span<const int> ranks, TimePoint when) {
  auto& mine = memory_.mine().holdups;
  for (size_t i = 0; i < StreamPage::kHoldups; ++i)
    mine.by[i].store(
        i < ranks.size() ? progress(memory_.sequence(), static_cast<uint64_t>(ranks[i]) + 1) : 0,
        std::memory_order_relaxed);
  mine.looked.store(when.time_since_epoch().count(), std::memory_order_release);  // holdups_of
}

std::vector<int> PageAgreement::holdups_of(int r) const {
  const auto& theirs = memory_.page(r).holdups;
  std::vector<int> ranks;
  const Duration age(now().time_since_epoch().count() -
                     theirs.looked.load(std::memory_order_acquire));
  if (age > kFresh) return ranks;
  for (const auto& by : theirs.by) {
    const uint64_t word = by.load(std::memory_order_relaxed);
    const auto member = static_cast<int>(static_cast<uint32_t>(word)) - 1;
    if (word >> 32 == memory_.sequence() && member >= 0 && member < memory_.size())
      ranks.push_back(member);
  }
  return ranks;
}

}  // namespace farandole
