#include "backends/paths.h"

#include <algorithm>
#include <array>
#include <limits>

#include "backends/tuning.h"

namespace farandole {

// Each in the file of its name.
extern const PathRow kLl, kOneShot, kMapped, kCma, kCico;

namespace {

constexpr std::array kPaths{&kLl, &kOneShot, &kMapped, &kCma, &kCico};

enum class Refusal : uint8_t {
  none,
  collective,
  too_long,
  memory,
  by_address,
  demanded,
  alone,
  too_short,
  too_late
};

/// Whether measured numbers say that `row` is worth leaving `usual` for.
bool worth_it(const PathRow& row, const PathRow& usual, const PathQuestion& question,
              const TuningTable& table) {
  return predicted_seconds(row, question, table) <
         kWorthLeaving * predicted_seconds(usual, question, table);
}

/// The refusal as far as a rank knows it before it has met the others.
Refusal early_refusal(const PathRow& row, const PathQuestion& q) {
  if ((row.kinds & bit(q.kind)) == 0) return Refusal::collective;
  if (q.size == 1 && row.alone == Alone::nothing) return Refusal::alone;
  if (row.by_address && !q.foreign) return Refusal::by_address;
  if (row.copies && q.demanded) return Refusal::demanded;
  const bool any_length = q.size == 1 && row.alone == Alone::any_length;
  return q.bytes > row.most_bytes && !any_length ? Refusal::too_long : Refusal::none;
}

/// Before a rank has met the others: every path but the mapped ones.
const PathRow& first_choice(const PathQuestion& question, const TuningTable& table) {
  const PathRow* usual = nullptr;
  const PathRow* quickest = nullptr;
  double least = std::numeric_limits<double>::infinity();
  for (const PathRow* row : kPaths) {
    if (row->mapped || early_refusal(*row, question) != Refusal::none) continue;
    if (!table.measured) return *row;
    if (usual == nullptr) usual = row;
    if (const double seconds = predicted_seconds(*row, question, table); seconds < least) {
      least = seconds;
      quickest = row;
    }
  }
  if (usual == nullptr) return *kPaths.back();
  return worth_it(*quickest, *usual, question, table) ? *quickest : *usual;
}

/// `first`: the first choice.
Refusal refusal(const PathRow& row, const PathQuestion& q, const PathRow& first) {
  const Refusal early = early_refusal(row, q);
  if (early != Refusal::none || !row.mapped) return early;
  if (!q.shared) return Refusal::memory;
  if (q.bytes < row.least_bytes(q.kind)) return Refusal::too_short;
  return first.agrees_by == AgreesBy::in_data ? Refusal::too_late : Refusal::none;
}

}  // namespace

double inputs_read(Collective kind, double size) {
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

std::span<const PathRow* const> path_table() { return kPaths; }

const PathRow* path_named(std::string_view name) {
  for (const PathRow* row : kPaths)
    if (row->name == name) return row;
  return nullptr;
}

bool fits(const PathRow& row, Collective kind, size_t bytes) {
  return (row.kinds & bit(kind)) != 0 && bytes <= row.most_bytes;
}

double predicted_seconds(const PathRow& row, const PathQuestion& q, const TuningTable& table) {
  const auto index = static_cast<size_t>(std::ranges::find(kPaths, &row) - kPaths.begin());
  const PathCosts& costs = table.paths[index];
  return costs.start + costs.byte * row.traffic(q.kind, static_cast<double>(q.size)) *
                           static_cast<double>(q.bytes);
}

const PathRow* choose_path(const PathQuestion& question, const TuningTable& table) {
  if (question.kind == Collective::barrier) return nullptr;
  const PathRow& first = first_choice(question, table);
  for (const PathRow* row : kPaths) {
    if (!row->mapped || refusal(*row, question, first) != Refusal::none) continue;
    return table.measured && worth_it(first, *row, question, table) ? &first : row;
  }
  return &first;
}

std::string why_not(const PathRow& row, const PathQuestion& q, const TuningTable& table) {
  switch (refusal(row, q, first_choice(q, table))) {
    case Refusal::none:
      return "";
    case Refusal::collective:
      return "does not run " + std::string(name_of(q.kind));
    case Refusal::too_long:
      return "takes at most " + std::to_string(row.most_bytes) + " bytes";
    case Refusal::memory:
      return "needs input and output in memory that all ranks map (farandole.allocate)";
    case Refusal::by_address:
      return "reaches other ranks' memory, which is forbidden or found to be slower";
    case Refusal::demanded:
      return "copies, where ranks were told to reach each other's memory (FARANDOLE_CMA=1)";
    case Refusal::alone:
      return "needs more than one rank";
    case Refusal::too_short:
      return "is worth it from " + std::to_string(row.least_bytes(q.kind)) + " bytes on";
    case Refusal::too_late:
      return "data are under way before ranks know where buffers lie";
  }
  return "";
}

}  // namespace farandole
