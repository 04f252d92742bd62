#include "engine/shm_direct.h"

#include <string>

namespace farandole {
namespace {

using Path = ShmDirect::Path;

struct PathRow {
  Path path;
  std::string_view name;
  std::unique_ptr<DirectPath> (*make)(const StreamMemory&);
  size_t most_bytes;  // of one rank's input
};

/// Where one_shot becomes faster than lines: at 256 B lines take 0.1 us less, at 1 KiB 0.4 more.
constexpr size_t kLinesBytes = 9 * kLinePayload;

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

bool is_small(const Operation& o, Path path) {
  return o.input.bytes() <= kPaths[static_cast<size_t>(path)].most_bytes;
}

}  // namespace

bool ShmDirect::can_run(const Operation& o) const {
  switch (o.kind) {
    case Collective::all_reduce:
    case Collective::reduce_scatter:
    case Collective::all_gather:
    case Collective::broadcast:
    case Collective::barrier:
      break;
    default:
      return false;
  }
  if (o.algorithm.empty()) return true;
  const PathRow* forced = row_named(o.algorithm);
  if (forced == nullptr) return false;
  return o.input.bytes() <= forced->most_bytes &&
         (forced->path != Path::window || o.kind == Collective::all_reduce);
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
  agreed_ = false;
  if (o.kind == Collective::barrier) return;
  if (const PathRow* forced = row_named(o.algorithm))
    path_ = &path(forced->path);
  else if (o.input.bytes() <= kLinesBytes)
    path_ = &path(Path::lines);
  else if (is_small(o, Path::one_shot) || memory_.size() == 1)
    path_ = &path(Path::one_shot);  // agreed() may prefer the window
  else
    path_ = &path(Path::staged);
  path_->start(o);
}

bool ShmDirect::is_path(std::string_view name) { return row_named(name) != nullptr; }

/// one_shot copies on while it waits for the others to post.
bool ShmDirect::agrees_in_data() const { return which_ == Path::lines || which_ == Path::one_shot; }

void ShmDirect::agreed() {
  agreed_ = true;
  choose_by_places();
}

/// Where the buffers lie is known when all have posted.
void ShmDirect::choose_by_places() {
  if (operation_->kind != Collective::all_reduce) return;
  DirectOperation what;
  what.start(*operation_, memory_);
  const bool shared = what.all_shared();
  if (operation_->algorithm == "window" && !shared && operation_->input.count > 0)
    throw Error(ErrorCode::invalid_argument,
                "algorithm 'window' needs input and output in memory that all ranks map", {},
                "use arrays from farandole.allocate(), or another algorithm");
  if (operation_->algorithm.empty() && shared && operation_->input.bytes() > kPieceBytes) {
    path_ = &path(Path::window);
    path_->start(*operation_);
  }
}

Progress ShmDirect::poll(TimePoint until) {
  if (path_ == nullptr) return Progress::finished;
  if (which_ == Path::one_shot && !agreed_) {
    if (compare_posts(memory_) != Agreement::same)
      return path_->show() ? Progress::moved : Progress::idle;
    agreed();
  }
  return path_->poll(until);
}

std::string_view ShmDirect::path_name() const {
  return which_ == Path::barrier ? "barrier" : kPaths[static_cast<size_t>(which_)].name;
}

}  // namespace farandole
