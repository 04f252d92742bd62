#include "backends/eager.h"

#include <algorithm>

#include "base/wire.h"
#include "schedule/slicing.h"
#include "stream/agreement.h"

namespace farandole {
namespace {

/// Bytes of the longest input and, or a little more, of all ranks' data together.
struct Amount {
  size_t one = 0, all = 0;
};

Amount amount_of(const Operation& operation, const StreamMemory& memory) {
  if (operation.kind == Collective::barrier) return {};
  const Shape shape = shape_of(operation, memory.rank, memory.size());
  size_t givers = 0;
  for (int r = 0; r < memory.size(); ++r) givers += is_read(operation.kind, shape, r) ? 1 : 0;
  const size_t one = longest_input(operation.kind, shape) * size_of(operation.input.dtype);
  return {one, givers * one};
}

/// Bytes that go through a host's link by the best schedule.
size_t least_bytes(Collective kind, const Amount& amount) {
  switch (kind) {
    case Collective::all_reduce:
      return 2 * amount.one;
    case Collective::all_gather:
    case Collective::gather:
      return amount.all;
    default:
      return amount.one;
  }
}

int most_ranks_of_a_host(const std::vector<int>& host_of) {
  int most = 1;
  for (const int host : host_of)
    most = std::max(most, static_cast<int>(std::ranges::count(host_of, host)));
  return most;
}

}  // namespace

EagerBackend::EagerBackend(const ScheduleGroup& group, const ChannelCosts& costs,
                           const StreamMemory& memory)
    : memory_(memory),
      ranks_of_a_host_(static_cast<size_t>(most_ranks_of_a_host(group.host_of))),
      bytes_of_its_rounds_(static_cast<size_t>(ceil_log2(group.size) * costs.round / costs.byte)),
      inputs_(static_cast<size_t>(group.size)) {}

/// If it is not named: a schedule takes at least as many rounds after the agreement's. Here each
/// rank's data go through a host's link once for each rank of the host.
bool EagerBackend::can_run(const Operation& o) const {
  if (is_between_two(o.kind) || !(o.algorithm.empty() || o.algorithm == kName)) return false;
  if (folds(o.kind) && !has_meaning(o.op, o.input.dtype)) return false;
  const Amount amount = amount_of(o, memory_);
  if (amount.all > kMostEagerBytes) return false;
  return !o.algorithm.empty() ||
         amount.all * ranks_of_a_host_ <= least_bytes(o.kind, amount) + bytes_of_its_rounds_;
}

void EagerBackend::refuse(const Operation& o) const {
  if (o.algorithm != kName) return;
  throw Error(ErrorCode::invalid_argument, "algorithm 'eager' takes up to " +
                                               std::to_string(kMostEagerBytes) +
                                               " bytes of all ranks' data together, not " +
                                               std::to_string(amount_of(o, memory_).all));
}

std::string EagerBackend::ways_for(const Operation& o) const {
  Operation forced = o;
  forced.algorithm = kName;
  return can_run(forced) ? "eager" : "not eager, which is for small data";
}

void EagerBackend::start(const Operation& operation, uint32_t) { what_.start(operation, memory_); }

std::span<const std::byte> EagerBackend::eager_data() const {
  const Operation& o = what_.operation();
  if (o.kind == Collective::barrier || !what_.is_read(memory_.rank)) return {};
  return {o.input.data, o.input.bytes()};
}

void EagerBackend::arrived(std::span<const std::span<const std::byte>> data) {
  for (int r = 0; r < memory_.size(); ++r) {
    const auto index = static_cast<size_t>(r);
    inputs_[index] = r == memory_.rank ? what_.operation().input.data : data[index].data();
    if (r != memory_.rank && what_.is_read(r) && data[index].size() != what_.input_bytes(r))
      taken("the data of an operation", memory_.members[index],
            memory_.members[static_cast<size_t>(memory_.rank)], [&] {
              WireReader::malformed(std::to_string(data[index].size()) + " bytes where " +
                                    std::to_string(what_.input_bytes(r)) + " belong");
            });
  }
}

Progress EagerBackend::poll(TimePoint) {
  const Operation& o = what_.operation();
  if (o.kind == Collective::barrier) return Progress::finished;
  const Scales scales =
      folds(o.kind) ? scales_for(o.input.dtype, o.op, o.prescale, o.postscale, memory_.size())
                    : Scales{};
  what_.finish(inputs_, scales, o.output.data);
  return Progress::finished;
}

}  // namespace farandole
