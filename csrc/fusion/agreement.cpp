#include "fusion/agreement.h"

#include <algorithm>
#include <cstring>

namespace farandole {
namespace {

constexpr size_t kRowBytes = 256;  // what ranks show each other of one field

std::string describe(const Parameter& p) {
  return "'" + p.name.substr(0, kRowBytes / 2) + "' (" + std::to_string(p.count) + " x " +
         std::string(name_of(p.dtype)) +
         (p.group == kNoGroup ? "" : ", group " + std::to_string(p.group)) + ")";
}

}  // namespace

std::vector<std::byte> OptionsAgreement::gather(const std::string& name, const void* mine,
                                                size_t bytes) const {
  std::vector<std::byte> all(bytes * static_cast<size_t>(group_.size()));
  Options o{{Collective::all_gather}};
  o.name = name;
  auto* in = const_cast<std::byte*>(static_cast<const std::byte*>(mine));
  group_.wait_for(
      group_.submit({in, bytes, DType::uint8}, {all.data(), all.size(), DType::uint8}, o, true),
      interrupted_);
  return all;
}

void OptionsAgreement::require_same(const std::string& field, const std::string& text,
                                    const std::string& verdict, const std::string& advice) const {
  std::vector<char> mine(kRowBytes);
  std::memcpy(mine.data(), text.data(), std::min(text.size(), kRowBytes - 1));
  const auto rows = gather(field + " of " + label_, mine.data(), kRowBytes);
  Context where;
  for (int r = 0; r < group_.size(); ++r) {
    const std::string theirs =
        reinterpret_cast<const char*>(rows.data() + kRowBytes * static_cast<size_t>(r));
    auto it = std::find_if(where.values.begin(), where.values.end(),
                           [&](const auto& v) { return v.first == theirs; });
    if (it == where.values.end()) it = where.values.insert(it, {theirs, {}});
    it->second.push_back(group_.members()[static_cast<size_t>(r)]);
  }
  if (where.values.size() < 2) return;
  const std::string what = verdict + ": " + describe_values(where.values);
  where.rank = odd_one(where.values);
  where.field = field;
  where.operation = "plan of " + label_;
  throw Error(ErrorCode::mismatch, what, std::move(where), advice);
}

void OptionsAgreement::require_same_plan(std::span<const Parameter> parameters,
                                         std::span<const Bucket> buckets) const {
  const uint64_t mine[] = {fingerprint(parameters, buckets), parameters.size()};
  const auto all = gather("plan of " + label_, mine, sizeof mine);
  bool same = true;
  uint64_t longest = 0;
  for (size_t at = 0; at < all.size(); at += sizeof mine) {
    uint64_t theirs[2];
    std::memcpy(theirs, all.data() + at, sizeof theirs);
    same = same && theirs[0] == mine[0];
    longest = std::max(longest, theirs[1]);
  }
  if (same) return;
  for (size_t i = 0; i < longest; ++i)
    require_same(
        "parameter " + std::to_string(i),
        i < parameters.size() ? describe(parameters[i]) : "no parameter",
        "ranks train different models: parameter " + std::to_string(i) + " (in ready order)",
        "build the same model, with the same trainable parameters, on every rank");
}

}  // namespace farandole
