#include "cuda/exchange/lane_tables.h"

#include <algorithm>
#include <bit>
#include <cstring>

namespace farandole::cuda {

LaneTables::LaneTables(std::shared_ptr<const DeviceContext> context, uint32_t rank, uint32_t size)
    : context_(std::move(context)),
      rank_(rank),
      size_(size),
      kept_(std::max(kFewest, kRoom / longest_lane_table(size))) {
  const size_t each = longest_lane_table(size_);
  const auto memory = std::make_shared<const Memory>(context_, kept_ * each);
  for (size_t i = 0; i < kept_; ++i)
    tables_.push_back({.memory = memory, .offset = i * each, .bytes = each});
}

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
  const Memory& memory = *table.memory;
  std::byte* const here = memory.here.host() + table.offset;
  if (!steps.empty()) std::memcpy(here, steps.data(), steps.size_bytes());
  std::memcpy(here + steps.size_bytes(), first.data(), first.size_bytes());
  const DevicePointer lies = memory.there->address() + table.offset;
  stream.copy(lies, memory.here.address() + table.offset, steps.size_bytes() + first.size_bytes());
  table.asked = asked;
  table.plan = {static_cast<const LaneStep*>(at_address(lies)),
                static_cast<const uint32_t*>(at_address(lies + steps.size_bytes())), made.lanes(),
                made.scratch};
  return table.plan;
}

/// The least recently used table that nothing reads any more, or a new one where operations in
/// flight read all of them. Puts it first.
LaneTables::Table& LaneTables::room_for(size_t bytes, const CompletionCount& completions) {
  const size_t room = longest_lane_table(size_);
  if (bytes > room) throw Error(ErrorCode::internal, "a schedule is longer than those of all ways");
  const auto old = std::ranges::find_if(tables_.rbegin(), tables_.rend(), [&](const Table& t) {
    return t.read_at && completions.reached(*t.read_at);
  });
  if (old != tables_.rend())
    tables_.splice(tables_.begin(), tables_, std::next(old).base());
  else
    tables_.push_front({.memory = std::make_shared<const Memory>(context_, room), .bytes = room});
  tables_.front().asked = {};
  tables_.front().read_at.reset();
  return tables_.front();
}

void LaneTables::end(uint32_t number) {
  for (Table& table : tables_)
    if (!table.read_at) table.read_at = number;
}

}  // namespace farandole::cuda
