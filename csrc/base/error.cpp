#include "base/error.h"

#include "base/printable.h"

namespace farandole {

namespace {
std::string full_text(ErrorCode code, const std::string& verdict, const Context& where,
                      const std::string& advice) {
  std::string text = printable(verdict);
  if (!where.evidence.empty()) text += "\n  evidence: " + printable(where.evidence);
  text += "\n  advice: " + (advice.empty() ? std::string(row(code).advice) : printable(advice));
  return text;
}
}  // namespace

Error::Error(ErrorCode code, const std::string& verdict, Context where, const std::string& advice)
    : std::runtime_error(full_text(code, verdict, where, advice)),
      code_(code),
      verdict_(printable(verdict)),
      where_(std::move(where)),
      advice_(advice.empty() ? std::string(row(code).advice) : printable(advice)) {
  where_.evidence = printable(where_.evidence);
}

Error invalid_argument(const std::string& verdict) {
  return Error(ErrorCode::invalid_argument, verdict);
}

Error left_world() {
  return Error(ErrorCode::not_initialized, "this rank has left the world by shutdown()");
}

std::string describe_ranks(const std::vector<int>& ranks) {
  std::string text;
  for (size_t i = 0; i < ranks.size();) {
    size_t last = i;
    while (last + 1 < ranks.size() && ranks[last + 1] == ranks[last] + 1) ++last;
    if (!text.empty()) text += ", ";
    text += std::to_string(ranks[i]);
    if (last > i) text += "-" + std::to_string(ranks[last]);
    i = last + 1;
  }
  return text;
}

std::string name_ranks(const std::vector<int>& ranks) {
  return (ranks.size() == 1 ? "rank " : "ranks ") + describe_ranks(ranks);
}

std::string describe_values(const RanksByValue& values) {
  std::string text;
  for (const auto& [value, ranks] : values)
    text +=
        (text.empty() ? "" : "; ") + (value.empty() ? "none" : value) + " on " + name_ranks(ranks);
  return text;
}

int odd_one(const RanksByValue& values) {
  if (values.size() != 2) return -1;
  for (size_t i : {0, 1})
    if (values[i].second.size() == 1 && values[1 - i].second.size() > 1)
      return values[i].second.front();
  return -1;
}

}  // namespace farandole
