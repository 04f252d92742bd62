#include "backends/path_choice.h"

#include <limits>

namespace farandole {
namespace {

constexpr uint32_t kAllReduce = bit(Collective::all_reduce);
constexpr uint32_t kAny = ~uint32_t{0};
constexpr uint32_t kReaders = kAny & ~kAllReduce;
constexpr uint32_t kWindow = kAllReduce | bit(Collective::reduce) | bit(Collective::gather);
constexpr size_t kUnlimited = ~size_t{0};

/// How many inputs' worth the busiest rank looks at: all, or a part of each.
double reads(Collective kind, double size) {
  switch (kind) {
    case Collective::all_reduce:
    case Collective::reduce:
    case Collective::all_gather:
    case Collective::gather:
      return size;
    default:
      return 1;
  }
}

/// Everybody's lines are copied out whole before they are looked at.
double lines_passes(Collective kind, double size) {
  return kind == Collective::broadcast || kind == Collective::scatter ? 2 : 1 + size;
}

double one_shot_passes(Collective kind, double size) { return 1 + reads(kind, size); }

/// My part of every input is read, and stored to every output; or my input to the root's.
double window_passes(Collective kind, double) { return kind == Collective::gather ? 1 : 2; }
double push_passes(Collective, double) { return 2; }
double pull_passes(Collective kind, double size) { return reads(kind, size); }

/// Published once; of a fold everybody reads a part of each input, and results are gathered.
double staged_passes(Collective kind, double size) {
  const bool gathers = kind == Collective::all_reduce || kind == Collective::reduce;
  return gathers ? 3 : 1 + reads(kind, size);
}

using T = TuningTable;
constexpr std::array<PathRow, 6> kPaths{{
    {PathKind::lines, "lines", kAny, kLines * kLinePayload, false, &T::lines_start, &T::lines_byte,
     lines_passes},
    {PathKind::one_shot, "one_shot", kAny, kOneShotBytes, false, &T::one_shot_start,
     &T::one_shot_byte, one_shot_passes},
    {PathKind::window, "window", kWindow, kUnlimited, false, &T::window_start, &T::window_byte,
     window_passes},
    {PathKind::push, "push", kAllReduce, kUnlimited, true, &T::push_start, &T::push_byte,
     push_passes},
    {PathKind::pull, "pull", kReaders, kUnlimited, true, &T::pull_start, &T::pull_byte,
     pull_passes},
    {PathKind::staged, "staged", kAny, kUnlimited, false, &T::staged_start, &T::staged_byte,
     staged_passes},
}};

/// Whether measured numbers say that `row` is worth leaving `usual` for.
bool worth_it(const PathRow& row, const PathRow& usual, const PathQuestion& question,
              const TuningTable& table) {
  return predicted_seconds(row, question, table) <
         kWorthLeaving * predicted_seconds(usual, question, table);
}

/// From what a rank knows before it has met the others: every path but the window.
const PathRow& first_choice(const PathQuestion& question, const TuningTable& table) {
  const PathRow* usual = nullptr;
  const PathRow* quickest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const PathRow& row : kPaths) {
    if (row.path == PathKind::window || refusal(row, question, table) != Refusal::none) continue;
    if (!table.measured) return row;
    if (usual == nullptr) usual = &row;
    if (const double seconds = predicted_seconds(row, question, table); seconds < least) {
      least = seconds;
      quickest = &row;
    }
  }
  if (usual == nullptr) return row_of(PathKind::staged);
  return worth_it(*quickest, *usual, question, table) ? *quickest : *usual;
}

}  // namespace

const std::array<PathRow, 6>& path_table() { return kPaths; }

const PathRow& row_of(PathKind path) { return kPaths[static_cast<size_t>(path)]; }

const PathRow* path_named(std::string_view name) {
  for (const PathRow& row : kPaths)
    if (row.name == name) return &row;
  return nullptr;
}

bool fits(const PathRow& row, Collective kind, size_t bytes) {
  return (row.kinds & bit(kind)) != 0 && bytes <= row.most_bytes;
}

Refusal refusal(const PathRow& row, const PathQuestion& q, const TuningTable& table) {
  if ((row.kinds & bit(q.kind)) == 0) return Refusal::collective;
  // A group of one has nobody to show anything to: one_shot then only works out the result.
  if (q.size == 1 && row.most_bytes == kUnlimited && row.path != PathKind::window)
    return Refusal::alone;
  if (row.by_address && !q.foreign) return Refusal::by_address;
  if (row.path == PathKind::staged && q.demanded) return Refusal::demanded;
  if (q.bytes > row.most_bytes && !(q.size == 1 && row.path == PathKind::one_shot))
    return Refusal::too_long;
  if (row.path != PathKind::window) return Refusal::none;
  if (!q.shared) return Refusal::memory;
  if (q.kind == Collective::gather && q.bytes < kHandedInBytes) return Refusal::too_short;
  // Lines carry the agreement with them: nobody learns in time where buffers lie.
  return first_choice(q, table).path == PathKind::lines ? Refusal::too_late : Refusal::none;
}

double predicted_seconds(const PathRow& row, const PathQuestion& q, const TuningTable& table) {
  return table.*row.start + table.*row.byte * row.passes(q.kind, static_cast<double>(q.size)) *
                                static_cast<double>(q.bytes);
}

PathKind choose_path(const PathQuestion& question, const TuningTable& table) {
  if (question.kind == Collective::barrier) return PathKind::barrier;
  const PathRow& first = first_choice(question, table);
  const PathRow& window = row_of(PathKind::window);
  if (refusal(window, question, table) != Refusal::none) return first.path;
  const bool other = table.measured && worth_it(first, window, question, table);
  return other ? first.path : PathKind::window;
}

}  // namespace farandole
