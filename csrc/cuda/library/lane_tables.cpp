#include "cuda/library/lane_tables.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace farandole::cuda {
namespace {

/// Room of a table at least: others find theirs where one has been.
constexpr size_t kLeastBytes = 4096;

}  // namespace

const LanesThere& LaneTables::get(const StreamRef& stream, const LanesAsked& asked,
                                  const CompletionCount& completions) {
  const auto known = std::ranges::find(tables_, asked, &Table::asked);
  if (known != tables_.end()) {
    tables_.splice(tables_.begin(), tables_, known);
    known->read_at.reset();
    return known->plan;
  }
  const LaneTable made = lanes_of(asked, rank_, size_);
  const std::span steps(made.steps);
  const std::span first(made.first);
  Table& table = room_for(steps.size_bytes() + first.size_bytes(), completions);
  if (!steps.empty()) std::memcpy(table.here.host(), steps.data(), steps.size_bytes());
  std::memcpy(table.here.host() + steps.size_bytes(), first.data(), first.size_bytes());
  const DevicePointer lies = table.there->address();
  stream.copy(lies, table.here.address(), steps.size_bytes() + first.size_bytes());
  table.asked = asked;
  table.plan = {static_cast<const LaneStep*>(at_address(lies)),
                static_cast<const uint32_t*>(at_address(lies + steps.size_bytes())), made.lanes(),
                made.scratch};
  return table.plan;
}

/// That of one that nobody reads any more, or more memory. It comes first.
LaneTables::Table& LaneTables::room_for(size_t bytes, const CompletionCount& completions) {
  if (tables_.size() >= kKept) {
    const auto old = std::ranges::find_if(tables_.rbegin(), tables_.rend(), [&](const Table& t) {
      return t.there->bytes() >= bytes && t.read_at && completions.reached(*t.read_at);
    });
    if (old != tables_.rend()) {
      tables_.splice(tables_.begin(), tables_, std::next(old).base());
      tables_.front().asked = {};
      tables_.front().read_at.reset();
      return tables_.front();
    }
  }
  return tables_.emplace_front(context_, std::max(kLeastBytes, std::bit_ceil(bytes)));
}

void LaneTables::end(uint32_t number) {
  for (Table& table : tables_)
    if (!table.read_at) table.read_at = number;
}

}  // namespace farandole::cuda
