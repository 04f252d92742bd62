#include "control/wait_circle.h"

#include <algorithm>

#include "base/seconds_text.h"

namespace farandole {
namespace {

constexpr size_t kMostTold = 4;  // ranks, in one verdict

bool shows_key(const RankWaits& rank, uint64_t key) {
  return std::ranges::any_of(rank.waits, [&](const Wait& w) { return w.key == key; });
}

/// The ranks that a wait still needs, as far as is known.
std::vector<int> missing_of(const Wait& wait, const RanksWaits& ranks) {
  std::vector<int> missing;
  for (const uint16_t r : wait.needed()) {
    const bool known = r < ranks.size() && ranks[r].has_value();
    if (wait.kind == Wait::named && known && shows_key(*ranks[r], wait.key)) continue;
    missing.push_back(r);
  }
  return missing;
}

/// Whether a wait never ends, because it needs a rank of `ranks` that has not begun it.
bool is_hopeless(const Wait& wait, const RanksWaits& ranks, const std::vector<bool>& gone) {
  if (wait.kind == Wait::moving) return false;
  const auto is_dead = [&](int r) { return ranks[static_cast<size_t>(r)].has_value(); };
  const std::vector<int> missing = missing_of(wait, ranks);
  if (wait.kind != Wait::any) return std::ranges::any_of(missing, is_dead);
  return std::ranges::any_of(missing, is_dead) && std::ranges::all_of(missing, [&](int r) {
           return is_dead(r) || gone[static_cast<size_t>(r)];
         });
}

}  // namespace

std::vector<int> circle_of(int self, const RanksWaits& ranks, const std::vector<bool>& gone) {
  RanksWaits dead = ranks;
  for (bool changed = true; changed;) {
    changed = false;
    for (std::optional<RankWaits>& rank : dead) {
      if (!rank) continue;
      const bool lives = !rank->complete || rank->waits.empty() ||
                         !std::ranges::all_of(rank->waits, [&](const Wait& wait) {
                           return is_hopeless(wait, dead, gone);
                         });
      if (!lives) continue;
      rank.reset();
      changed = true;
    }
  }
  std::vector<int> found, next{self};
  while (!next.empty()) {
    const int r = next.back();
    next.pop_back();
    const auto& rank = dead[static_cast<size_t>(r)];
    if (!rank || std::ranges::find(found, r) != found.end()) continue;
    found.push_back(r);
    for (const Wait& wait : rank->waits)
      for (const int other : missing_of(wait, dead)) next.push_back(other);
  }
  std::ranges::sort(found);
  return found;
}

std::string waits_text(const RankWaits& rank, const RanksWaits& ranks) {
  const Wait* first = nullptr;
  size_t count = 0;
  for (const Wait& wait : rank.waits) {
    if (wait.kind == Wait::moving) continue;
    if (first == nullptr) first = &wait;
    ++count;
  }
  if (first == nullptr || rank.titles.empty()) return "";
  std::string text = "waits in " + rank.titles.front();
  if (count > 1) text += " and " + std::to_string(count - 1) + " more";
  const std::vector<int> missing = missing_of(*first, ranks);
  if (!missing.empty())
    text += (first->kind == Wait::any ? " for any of " : " for ") + name_ranks(missing);
  return text;
}

std::string story_of(const std::vector<int>& circle, const RanksWaits& ranks) {
  std::string text;
  for (size_t i = 0; i < circle.size(); ++i) {
    if (i == kMostTold) {
      text += "; and so on in " + name_ranks({circle.begin() + kMostTold, circle.end()});
      break;
    }
    const RankWaits& rank = *ranks[static_cast<size_t>(circle[i])];
    text += (i > 0 ? "; rank " : "rank ") + std::to_string(circle[i]);
    if (!rank.step.empty()) text += " " + rank.step + " and";
    text += " " + waits_text(rank, ranks);
  }
  return text;
}

Error deadlock_of(const std::vector<int>& circle, const RanksWaits& ranks, TimePoint when) {
  Context where;
  where.rank = circle.front();
  TimePoint since{};
  bool loops = false;
  std::string places;
  for (const int r : circle) {
    const RankWaits& rank = *ranks[static_cast<size_t>(r)];
    since = std::max(since, rank.still_since);
    loops |= !rank.step.empty();
    if (!rank.place.empty()) places += "; rank " + std::to_string(r) + " is at " + rank.place;
    const std::string title = rank.titles.empty() ? "" : rank.titles.front();
    const auto same = std::ranges::find(where.values, title, [](const auto& v) { return v.first; });
    if (same != where.values.end())
      same->second.push_back(r);
    else
      where.values.push_back({title, {r}});
  }
  const RankWaits& first = *ranks[static_cast<size_t>(circle.front())];
  if (!first.titles.empty()) where.operation = first.titles.front();
  where.evidence = "none of them has moved for " + seconds_text(when - since) + places;
  return Error(ErrorCode::deadlock,
               name_ranks(circle) + " wait for each other for ever: " + story_of(circle, ranks),
               std::move(where),
               loops ? "give every rank the same number of batches and the same calls after them"
                     : "make every rank call the same operations in the same order");
}

}  // namespace farandole
