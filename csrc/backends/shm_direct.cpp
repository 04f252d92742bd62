#include "backends/shm_direct.h"

#include <string>

#include "base/spelling.h"
#include "schedule/routes.h"

namespace farandole {
namespace {

/// By PathKind.
constexpr std::array<std::unique_ptr<DirectPath> (*)(const StreamMemory&), 6> kMakers{
    make_lines, make_one_shot, make_window, make_push, make_pull, make_staged};

/// Of the longest input, which all ranks know: a rank's own may be shorter.
size_t longest_bytes(const Operation& o, int size) {
  Shape shape;
  shape.size = size;
  shape.count = o.count;
  shape.counts = o.counts;
  shape.root = o.root;
  return longest_input(o.kind, shape) * size_of(o.input.dtype);
}

}  // namespace

bool ShmDirect::can_run(const Operation& o) const {
  if (o.algorithm.empty()) return true;
  const PathRow* forced = path_named(o.algorithm);
  return forced != nullptr && fits(*forced, o.kind, longest_bytes(o, memory_.size())) &&
         (memory_.foreign || !forced->by_address);
}

DirectPath& ShmDirect::path(PathKind which) {
  const auto index = static_cast<size_t>(which);
  auto& made = paths_[index];
  if (!made) made = kMakers[index](memory_);
  which_ = which;
  return *made;
}

PathQuestion ShmDirect::question(const Operation& o, bool shared) const {
  return {o.kind, longest_bytes(o, memory_.size()), memory_.size(),
          shared, memory_.prefers_foreign,          memory_.demands_foreign};
}

void ShmDirect::start(const Operation& o, uint32_t) {
  operation_ = &o;
  path_ = nullptr;
  which_ = PathKind::barrier;
  agreed_ = false;
  if (o.kind == Collective::barrier) return;
  const PathRow* forced = path_named(o.algorithm);
  path_ = &path(forced != nullptr ? forced->path : choose_path(question(o, false), tuning_));
  // Nobody looks at the places of lines, which wait for no line that peers have just read.
  if (which_ != PathKind::lines) show_places(o, memory_);
  path_->start(o);
}

void ShmDirect::refuse(const Operation& o) const {
  const PathRow* forced = path_named(o.algorithm);
  if (forced == nullptr) return;
  if (forced->by_address && !memory_.foreign)
    throw Error(ErrorCode::invalid_argument,
                "algorithm '" + o.algorithm +
                    "' needs to reach other ranks' memory, which it may not: " + why_not_foreign_,
                {},
                "let the kernel permit process_vm_readv and process_vm_writev between ranks, "
                "or use another algorithm");
  throw Error(ErrorCode::invalid_argument, "path '" + o.algorithm + "' cannot run " +
                                               std::string(name_of(o.kind)) + " of " +
                                               std::to_string(o.input.bytes()) + " bytes");
}

std::string ShmDirect::ways_for(const Operation& o) const {
  const size_t longest = longest_bytes(o, memory_.size());
  std::vector<std::string_view> names;
  for (const PathRow& row : path_table())
    if (fits(row, o.kind, longest) && (memory_.foreign || !row.by_address))
      names.push_back(row.name);
  return "over shared memory: " + join_names(names);
}

/// one_shot copies on while it waits for the others to post.
bool ShmDirect::agrees_in_data() const {
  return which_ == PathKind::lines || which_ == PathKind::one_shot;
}

void ShmDirect::agreed() {
  agreed_ = true;
  choose_by_places();
}

/// Where the buffers lie is known when all have posted.
void ShmDirect::choose_by_places() {
  if (which_ == PathKind::lines || !fits(row_of(PathKind::window), operation_->kind, 0)) return;
  const bool forced = operation_->algorithm == "window";
  const bool wanted = operation_->algorithm.empty() &&
                      choose_path(question(*operation_, true), tuning_) == PathKind::window;
  if (!forced && !wanted) return;
  DirectOperation what;
  what.start(*operation_, memory_);
  const bool open = what.window_is_open();
  if (forced && !open)
    throw Error(ErrorCode::invalid_argument,
                "algorithm 'window' needs input and output in memory that all ranks map", {},
                "use arrays from farandole.allocate(), or another algorithm");
  if (wanted && open) {
    path_ = &path(PathKind::window);
    path_->start(*operation_);
  }
}

Progress ShmDirect::poll(TimePoint until) {
  if (which_ == PathKind::one_shot && !agreed_) {
    if (compare_posts(memory_) != Posts::same)
      return path_->show() ? Progress::moved : Progress::idle;
    agreed();
  }
  return path_ == nullptr ? Progress::finished : path_->poll(until);
}

std::vector<int> ShmDirect::lacking() const {
  const bool agreed = agreed_ || which_ == PathKind::lines;
  return path_ == nullptr || !agreed ? std::vector<int>() : path_->lacking();
}

std::string_view ShmDirect::way() const {
  return which_ == PathKind::barrier ? "barrier" : row_of(which_).name;
}

}  // namespace farandole
