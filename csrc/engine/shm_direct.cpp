#include "engine/shm_direct.h"

#include <string>

namespace farandole {
namespace {

using Path = ShmDirect::Path;

struct PathRow {
  Path path;
  std::string_view name;
  std::unique_ptr<DirectPath> (*make)(const StreamMemory&);
  size_t most_bytes;  // of the longest input
};

constexpr size_t kUnlimited = ~size_t{0};
constexpr std::array<PathRow, 4> kPaths{{
    {Path::lines, "lines", make_lines, kLines * kLinePayload},
    {Path::one_shot, "one_shot", make_one_shot, kOneShotBytes},
    {Path::window, "window", make_window, kUnlimited},
    {Path::staged, "staged", make_staged, kUnlimited},
}};

const PathRow* row_named(std::string_view name) {
  for (const PathRow& r : kPaths)
    if (r.name == name) return &r;
  return nullptr;
}

/// Of the longest input, which all ranks know: a rank's own may be shorter.
size_t longest_bytes(const Operation& o, int size) {
  Shape shape;
  shape.size = size;
  shape.count = o.count;
  shape.counts = o.counts;
  shape.root = o.root;
  return longest_input(o.kind, shape) * size_of(o.input.dtype);
}

bool has_window(Collective kind) {
  return kind == Collective::all_reduce || kind == Collective::reduce;
}

}  // namespace

bool ShmDirect::can_run(const Operation& o) const {
  if (o.algorithm.empty()) return true;
  const PathRow* forced = row_named(o.algorithm);
  if (forced == nullptr) return false;
  return longest_bytes(o, memory_.size()) <= forced->most_bytes &&
         (forced->path != Path::window || has_window(o.kind));
}

DirectPath& ShmDirect::path(Path which) {
  auto& made = paths_[static_cast<size_t>(which)];
  if (!made) made = kPaths[static_cast<size_t>(which)].make(memory_);
  which_ = which;
  return *made;
}

void ShmDirect::start(const Operation& o, uint32_t) {
  operation_ = &o;
  path_ = nullptr;
  which_ = Path::barrier;
  if (o.kind == Collective::barrier) return;
  const size_t bytes = longest_bytes(o, memory_.size());
  const auto fits = [&](Path p) { return bytes <= kPaths[static_cast<size_t>(p)].most_bytes; };
  if (const PathRow* forced = row_named(o.algorithm))
    path_ = &path(forced->path);
  else if (fits(Path::lines))
    path_ = &path(Path::lines);
  else if (fits(Path::one_shot) || memory_.size() == 1)
    path_ = &path(Path::one_shot);  // agreed() may prefer the window
  else
    path_ = &path(Path::staged);
  path_->start(o);
}

bool ShmDirect::is_path(std::string_view name) { return row_named(name) != nullptr; }

bool ShmDirect::agrees_in_data() const { return which_ == Path::lines; }

void ShmDirect::agreed() {
  if (!has_window(operation_->kind) || which_ == Path::lines) return;
  DirectOperation what;
  what.start(*operation_, memory_);
  const bool shared = what.all_shared();
  if (operation_->algorithm == "window" && !shared && operation_->count > 0)
    throw Error(ErrorCode::invalid_argument,
                "algorithm 'window' needs input and output in memory that all ranks map", {},
                "use arrays from farandole.allocate(), or another algorithm");
  if (operation_->algorithm.empty() && shared) {
    path_ = &path(Path::window);
    path_->start(*operation_);
  }
}

Progress ShmDirect::poll(TimePoint until) {
  return path_ == nullptr ? Progress::finished : path_->poll(until);
}

std::string_view ShmDirect::path_name() const {
  return which_ == Path::barrier ? "barrier" : kPaths[static_cast<size_t>(which_)].name;
}

}  // namespace farandole
