#include "engine/shm_direct.h"

#include <array>
#include <string>

namespace farandole {
namespace {

/// By PathKind.
constexpr std::array<std::unique_ptr<DirectPath> (*)(const StreamMemory&), 4> kMakers{
    make_lines, make_one_shot, make_window, make_staged};

}  // namespace

bool ShmDirect::can_run(const Operation& o) const {
  if (!has_path(o.kind)) return false;
  if (o.algorithm.empty()) return true;
  const PathRow* forced = path_named(o.algorithm);
  return forced != nullptr && fits(*forced, o.kind, o.input.bytes());
}

DirectPath& ShmDirect::path(PathKind which) {
  const auto index = static_cast<size_t>(which);
  auto& made = paths_[index];
  if (!made) made = kMakers[index](memory_);
  which_ = which;
  return *made;
}

PathQuestion ShmDirect::question(const Operation& o, bool shared) const {
  return {o.kind, o.input.bytes(), memory_.size(), shared};
}

void ShmDirect::start(const Operation& o, uint32_t) {
  operation_ = &o;
  path_ = nullptr;
  which_ = PathKind::barrier;
  if (o.kind == Collective::barrier) return;
  const PathRow* forced = path_named(o.algorithm);
  path_ = &path(forced != nullptr ? forced->path : choose_path(question(o, false), tuning_));
  path_->start(o);
}

bool ShmDirect::is_path(std::string_view name) { return path_named(name) != nullptr; }

bool ShmDirect::agrees_in_data() const { return which_ == PathKind::lines; }

void ShmDirect::agreed() {
  if (operation_->kind != Collective::all_reduce || which_ == PathKind::lines) return;
  DirectOperation what;
  what.start(*operation_, memory_);
  const bool shared = what.all_shared();
  if (operation_->algorithm == "window" && !shared && operation_->input.count > 0)
    throw Error(ErrorCode::invalid_argument,
                "algorithm 'window' needs input and output in memory that all ranks map", {},
                "use arrays from farandole.allocate(), or another algorithm");
  if (operation_->algorithm.empty() && shared &&
      choose_path(question(*operation_, true), tuning_) == PathKind::window) {
    path_ = &path(PathKind::window);
    path_->start(*operation_);
  }
}

Progress ShmDirect::poll(TimePoint until) {
  return path_ == nullptr ? Progress::finished : path_->poll(until);
}

std::string_view ShmDirect::path_name() const {
  return which_ == PathKind::barrier ? "barrier" : row_of(which_).name;
}

}  // namespace farandole
