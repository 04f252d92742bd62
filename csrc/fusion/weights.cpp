#include "fusion/weights.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <cstdio>
#include <utility>

#include "stream/bytes_begun.h"

namespace farandole {
namespace {

std::string hexadecimal(uint64_t value) {
  std::array<char, 17> text{};
  std::snprintf(text.data(), text.size(), "%016llx", static_cast<unsigned long long>(value));
  return text.data();
}

bool differs(std::span<const WeightsRow> rows, size_t i) {
  return std::ranges::any_of(
      rows, [&](const WeightsRow& row) { return row.checksums[i] != rows.front().checksums[i]; });
}

/// The checksums of parameter i and the ranks that have each, in the order of ranks.
RanksByValue givers_of(std::span<const WeightsRow> rows, size_t i) {
  RanksByValue givers;
  for (const WeightsRow& row : rows) {
    const std::string value = hexadecimal(row.checksums[i]);
    auto found = std::ranges::find(givers, value, &RanksByValue::value_type::first);
    if (found == givers.end()) found = givers.insert(givers.end(), {value, {}});
    found->second.push_back(row.rank);
  }
  return givers;
}

std::string what_happened(const WeightsContext& context) {
  if (context.equal_before == 0) return "ranks start from different weights";
  return "the ranks' weights have come apart: they were the same before step " +
         std::to_string(context.equal_before) + ", and differ before step " +
         std::to_string(context.step);
}

std::string advice_for(const WeightsContext& context) {
  if (context.equal_before == 0)
    return "add " + context.line +
           " before the first step; where weights differ on purpose, set "
           "FARANDOLE_CHECK_WEIGHTS=off";
  return "look for what one rank alone does: an update that it skips or repeats, a checkpoint that "
         "it loads; what has happened is mended by " +
         context.line;
}

}  // namespace

std::optional<Error> difference_of_weights(std::span<const std::string> names,
                                           std::span<const WeightsRow> rows,
                                           const WeightsContext& context) {
  if (rows.empty()) return std::nullopt;
  size_t first = names.size(), count = 0;
  for (size_t i = 0; i < names.size(); ++i) {
    if (!differs(rows, i)) continue;
    first = std::min(first, i);
    ++count;
  }
  if (count == 0) return std::nullopt;
  RanksByValue givers = givers_of(rows, first);
  const std::string verdict = what_happened(context) + ": '" + names[first] + "' has checksum " +
                              describe_values(givers) + "; " + std::to_string(count) + " of " +
                              std::to_string(names.size()) +
                              (count == 1 ? " weights differs" : " weights differ");
  Context where;
  where.rank = odd_one(givers);
  where.tensor = names[first];
  where.field = "weights";
  where.values = std::move(givers);
  where.evidence = "the bits of all weights were compared as step " + std::to_string(context.step) +
                   " began, before it changed any";
  return Error(ErrorCode::mismatch, verdict, std::move(where), advice_for(context));
}

bool compares_weights(uint64_t step, double period) {
  if (step == 2) return std::isfinite(period);
  return std::fmod(static_cast<double>(step - 1), period) == 0;
}

void WeightsWatch::show(std::vector<uint64_t> checksums) {
  if (checksums.size() != names_.size())
    throw Error(ErrorCode::invalid_argument, "a checksum for each parameter");
  shown_ = std::move(checksums);
}

std::optional<Handle> WeightsWatch::launch(Group& group, const std::shared_ptr<Stream>& stream) {
  if (!due()) return std::nullopt;
  const size_t all = width() * static_cast<size_t>(group.size());
  rows_ = std::make_shared<std::vector<uint64_t>>(width() + all);
  rows_->front() = shown_.empty() ? 0 : 1;
  std::ranges::copy(shown_, rows_->begin() + 1);
  shown_.clear();
  auto* const mine = reinterpret_cast<std::byte*>(rows_->data());
  Options o{{Collective::all_gather}};
  o.keepalive = rows_;
  o.name = "weights";
  bytes_begun_in_steps.fetch_add(width() * sizeof(uint64_t), std::memory_order_relaxed);
  return group.submit_to(stream, {mine, width(), DType::uint64},
                         {mine + width() * sizeof(uint64_t), all, DType::uint64}, std::move(o));
}

std::optional<Error> WeightsWatch::judge(const Group& group) {
  const auto gathered = std::exchange(rows_, nullptr);
  if (!due() || !gathered) return std::nullopt;  // what should have sent them failed
  std::vector<WeightsRow> rows;
  auto row = gathered->begin() + static_cast<std::ptrdiff_t>(width());
  for (const int rank : group.members()) {
    const auto end = row + static_cast<std::ptrdiff_t>(width());
    if (*row != 0) rows.push_back({rank, {row + 1, end}});
    row = end;
  }
  if (auto error = difference_of_weights(names_, rows, {step_, equal_before_, line_})) return error;
  equal_before_ = step_;
  return std::nullopt;
}

}  // namespace farandole
