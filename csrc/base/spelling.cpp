#include "base/spelling.h"

#include <algorithm>
#include <numeric>
#include <vector>

namespace farandole {
namespace {

/// Levenshtein's distance, by one row of his table.
size_t changes_between(std::string_view a, std::string_view b) {
  std::vector<size_t> row(b.size() + 1);
  std::iota(row.begin(), row.end(), size_t{0});
  for (size_t i = 0; i < a.size(); ++i) {
    size_t diagonal = row[0];
    row[0] = i + 1;
    for (size_t j = 0; j < b.size(); ++j) {
      const size_t changed = diagonal + (a[i] == b[j] ? 0 : 1);
      diagonal = row[j + 1];
      row[j + 1] = std::min({changed, row[j] + 1, row[j + 1] + 1});
    }
  }
  return row.back();
}

}  // namespace

std::string_view closest(std::string_view written, std::span<const std::string_view> names) {
  size_t fewest = std::max<size_t>(2, written.size() / 3) + 1;  // more is another word
  std::string_view best;
  for (const std::string_view name : names) {
    const size_t changes = changes_between(written, name);
    if (changes >= fewest || changes >= name.size()) continue;
    fewest = changes;
    best = name;
  }
  return best;
}

std::string did_you_mean(std::string_view written, std::span<const std::string_view> names) {
  const std::string_view name = closest(written, names);
  return name.empty() ? "" : "; did you mean " + std::string(name) + "?";
}

std::string join_names(std::span<const std::string_view> names) {
  std::string text;
  for (const std::string_view name : names) text += (text.empty() ? "" : ", ") + std::string(name);
  return text;
}

}  // namespace farandole
