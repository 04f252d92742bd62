#include "engine/direct_choice.h"

#include <limits>

namespace farandole {
namespace {

constexpr uint32_t kAllReduce = bit(Collective::all_reduce);
constexpr uint32_t kMoves = kAllReduce | bit(Collective::reduce_scatter) |
                            bit(Collective::all_gather) | bit(Collective::broadcast);
constexpr uint32_t kAny = kMoves | bit(Collective::barrier);
constexpr size_t kUnlimited = ~size_t{0};

/// Everybody's input is copied out of its lines before it is looked at.
double lines_passes(Collective kind, double size) {
  return kind == Collective::broadcast ? 2 : 1 + size;
}

/// Shown once; then read by everybody, whole where everybody's result needs all of it.
double one_shot_passes(Collective kind, double size) {
  return kind == Collective::all_reduce || kind == Collective::all_gather ? 1 + size : 2;
}

/// My part of every input is read, and stored to every output.
double window_passes(Collective, double) { return 2; }

/// Published once, read by part; results of all_reduce are gathered, all_gather reads everything.
double staged_passes(Collective kind, double size) {
  return kind == Collective::all_reduce ? 3 : kind == Collective::all_gather ? 1 + size : 2;
}

using T = TuningTable;
constexpr std::array<PathRow, 4> kPaths{{
    {PathKind::lines, "lines", kAny, kLines * kLinePayload, &T::lines_start, &T::lines_byte,
     lines_passes},
    {PathKind::one_shot, "one_shot", kAny, kOneShotBytes, &T::one_shot_start, &T::one_shot_byte,
     one_shot_passes},
    {PathKind::window, "window", kAllReduce, kUnlimited, &T::window_start, &T::window_byte,
     window_passes},
    {PathKind::staged, "staged", kAny, kUnlimited, &T::staged_start, &T::staged_byte,
     staged_passes},
}};

/// From what a rank knows before it has met the others: every path but the window.
PathKind first_choice(const PathQuestion& question, const TuningTable& table) {
  PathQuestion apart = question;
  apart.shared = false;
  PathKind best = PathKind::staged;
  double least = std::numeric_limits<double>::infinity();
  for (const PathRow& row : kPaths) {
    if (row.path == PathKind::window || refusal(row, apart, table) != Refusal::none) continue;
    const double seconds = predicted_seconds(row, apart, table);
    if (seconds < least) {
      least = seconds;
      best = row.path;
    }
  }
  return best;
}

}  // namespace

const std::array<PathRow, 4>& path_table() { return kPaths; }

const PathRow& row_of(PathKind path) { return kPaths[static_cast<size_t>(path)]; }

const PathRow* path_named(std::string_view name) {
  for (const PathRow& row : kPaths)
    if (row.name == name) return &row;
  return nullptr;
}

bool fits(const PathRow& row, Collective kind, size_t bytes) {
  return (row.kinds & bit(kind)) != 0 && bytes <= row.most_bytes;
}

bool has_path(Collective kind) { return (kAny & bit(kind)) != 0; }

Refusal refusal(const PathRow& row, const PathQuestion& q, const TuningTable& table) {
  if ((row.kinds & bit(q.kind)) == 0) return Refusal::collective;
  // A group of one has nobody to show anything to: one_shot then only works out the result.
  if (q.size == 1 && row.path == PathKind::staged) return Refusal::alone;
  if (q.bytes > row.most_bytes && !(q.size == 1 && row.path == PathKind::one_shot))
    return Refusal::too_long;
  if (row.path != PathKind::window) return Refusal::none;
  if (!q.shared) return Refusal::memory;
  // Lines carry the agreement with them: nobody learns in time where buffers lie.
  return first_choice(q, table) == PathKind::lines ? Refusal::too_late : Refusal::none;
}

double predicted_seconds(const PathRow& row, const PathQuestion& q, const TuningTable& table) {
  return table.*row.start + table.*row.byte * row.passes(q.kind, static_cast<double>(q.size)) *
                                static_cast<double>(q.bytes);
}

PathKind choose_path(const PathQuestion& question, const TuningTable& table) {
  if (question.kind == Collective::barrier) return PathKind::barrier;
  const PathKind first = first_choice(question, table);
  const PathRow& window = row_of(PathKind::window);
  if (refusal(window, question, table) != Refusal::none) return first;
  const bool better = predicted_seconds(window, question, table) <
                      predicted_seconds(row_of(first), question, table);
  return better ? PathKind::window : first;
}

}  // namespace farandole
