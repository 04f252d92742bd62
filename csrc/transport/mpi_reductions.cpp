// MPI's own all-reduce: see the note in transport/mpi_port.h.
#include <algorithm>
#include <map>
#include <mutex>
#include <set>
#include <utility>

#include "transport/mpi_end.h"
#include "transport/mpi_frame.h"

namespace farandole {
namespace {

constexpr auto kListening = std::chrono::milliseconds(250);  // of others that have begun

/// The ranks that a rank tells. News from one rank reaches all in as many hops as there are bits in
/// the number of ranks.
std::set<int> neighbours(int rank, int size) {
  std::set<int> all;
  for (int distance = 1; distance < size; distance *= 2) {
    all.insert((rank + distance) % size);
    all.insert((rank + size - distance) % size);
  }
  return all;
}

/// How many more have begun there than here.
int32_t ahead_by(uint32_t there, uint32_t here) { return static_cast<int32_t>(there - here); }

}  // namespace

std::shared_ptr<MpiDuplicates> mpi_duplicates_of(uint64_t communicator) {
  static std::mutex mutex;  // guards what follows
  static auto* const all = new std::map<uint64_t, std::shared_ptr<MpiDuplicates>>;
  const std::lock_guard lock(mutex);
  std::shared_ptr<MpiDuplicates>& found = (*all)[communicator];
  if (!found) found = std::make_shared<MpiDuplicates>();
  return found;
}

bool MpiPort::reduce(MpiReduction& reduction) {
  const std::lock_guard lock(mutex_);
  if (!usable() || reductions_end_) return false;
  expects_.store(true, std::memory_order_relaxed);
  guard([&] {
    if (reduction.stage == MpiReduction::Stage::waiting) begin(reduction);
    ends(reduction);
  });
  return reduction.stage == MpiReduction::Stage::complete;
}

/// Begins the all-reduce if its communicator is there.
void MpiPort::begin(MpiReduction& reduction) {
  if (!has_communicator(reduction.communicator)) return;
  MpiDuplicate& duplicate = (*duplicates_)[reduction.communicator];
  ++duplicate.begun;
  reduction.request = functions_->all_reduce(reduction.input, reduction.output, reduction.count,
                                             reduction.dtype, reduction.op, duplicate.handle);
  reduction.stage = MpiReduction::Stage::begun;
}

/// Whether MPI is done with it.
bool MpiPort::ends(MpiReduction& reduction) {
  if (reduction.stage != MpiReduction::Stage::begun || !functions_->test(reduction.request))
    return false;
  reduction.stage = MpiReduction::Stage::complete;
  return true;
}

bool MpiPort::has_communicator(size_t number) {
  MpiDuplicates& all = *duplicates_;
  for (;;) {
    if (number < all.size() && all[number].ready) return true;
    if (!all.empty() && !all.back().ready) {
      if (!functions_->test(all.back().request)) return false;
      functions_->adopt(all.back().handle);
      all.back().ready = true;
      continue;
    }
    all.emplace_back();
    all.back().request = functions_->duplicate(all.back().handle);
  }
}

// ---- the end in the middle of something ----

Held MpiPort::let_go(MpiReduction& reduction) {
  const std::lock_guard lock(mutex_);
  if (reduction.stage == MpiReduction::Stage::complete) return Held::no;
  reductions_end_ = true;
  if (reduction.ends_since == TimePoint{}) reduction.ends_since = now();
  const bool begun = reduction.stage == MpiReduction::Stage::begun;
  if (state_ == State::open && may_call())
    guard([&] {
      for (const int peer : neighbours(rank_, size_)) link_to(peer);
      if (begun && !std::exchange(reduction.told, true)) tell_begun(reduction);
      for (auto& [peer, link] : links_) progress(link);
      progress_joined();
      ends(reduction);
    });
  if (reduction.stage == MpiReduction::Stage::complete) return Held::no;
  const Duration patience =
      begun || !joined_.empty() ? Duration(kLongestHold) : Duration(kListening);
  if (state_ == State::open && now() - reduction.ends_since < patience) return Held::for_now;
  if (!begun) return Held::no;
  lose("not all ranks took part in ending an all-reduce by MPI, which may still use its memory");
  leave_memory_with_mpi();
  return Held::for_ever;
}

void MpiPort::tell_begun(const MpiReduction& reduction) {
  const MpiFrame told{.world = world_,
                      .stream = reduction.communicator,
                      .lane = static_cast<int32_t>(reduction.dtype),
                      .kind = MpiFrameKind::begun,
                      .count = reduction.count,
                      .tag = static_cast<int32_t>(reduction.op),
                      .takes = (*duplicates_)[reduction.communicator].begun};
  for (const int peer : neighbours(rank_, size_)) send(link_to(peer), told, nullptr, {});
}

/// Joins the all-reduce unless this rank has begun it. The world has failed; its error follows.
void MpiPort::join(const MpiFrame& told, int from) {
  const auto dtype = static_cast<size_t>(told.lane), op = static_cast<size_t>(told.tag);
  if (told.stream >= duplicates_->size() || dtype >= kDTypes.size() || op >= kReduceOps.size() ||
      told.count == 0 || told.count > kMostReduced)
    throw foreign_message(from);
  const auto communicator = static_cast<size_t>(told.stream);
  const auto joins = [&](const auto& joined) {
    return joined->reduction.communicator == communicator;
  };
  if (ahead_by(told.takes, (*duplicates_)[communicator].begun) <= 0 ||
      std::ranges::any_of(joined_, joins))
    return;
  reductions_end_ = true;
  auto joined = std::make_unique<MpiJoined>();
  MpiReduction& reduction = joined->reduction;
  reduction.communicator = communicator;
  reduction.count = told.count;
  reduction.dtype = static_cast<DType>(dtype);
  reduction.op = static_cast<ReduceOp>(op);
  joined->memory = std::make_unique<std::byte[]>(reduction.count * size_of(reduction.dtype));
  reduction.input = reduction.output = joined->memory.get();
  joined_.push_back(std::move(joined));
}

/// Tells others of each, since some may learn of it from this rank alone.
void MpiPort::progress_joined() {
  std::erase_if(joined_, [&](const auto& joined) {
    MpiReduction& reduction = joined->reduction;
    if (reduction.stage == MpiReduction::Stage::waiting) begin(reduction);
    if (reduction.stage == MpiReduction::Stage::begun && !std::exchange(reduction.told, true))
      tell_begun(reduction);
    return ends(reduction);
  });
}

}  // namespace farandole
