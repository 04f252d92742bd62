#include "engine/shm_direct.h"

#include <string>

namespace farandole {
namespace {

using Path = ShmDirect::Path;

using Kinds = uint32_t;  // a bit for each
constexpr Kinds bit(Collective kind) { return 1U << static_cast<unsigned>(kind); }
constexpr Kinds kAllReduce = bit(Collective::all_reduce);
constexpr Kinds kAny = ~Kinds{0};
constexpr Kinds kReaders = kAny & ~kAllReduce;
constexpr Kinds kWindow = kAllReduce | bit(Collective::reduce);

struct PathRow {
  Path path;
  std::string_view name;
  std::unique_ptr<DirectPath> (*make)(const StreamMemory&);
  Kinds kinds;
  size_t most_bytes;  // of the longest input
  bool by_address;    // reaches other ranks' memory
};

constexpr size_t kUnlimited = ~size_t{0};
constexpr std::array<PathRow, 6> kPaths{{
    {Path::lines, "lines", make_lines, kAny, kLines * kLinePayload, false},
    {Path::one_shot, "one_shot", make_one_shot, kAny, kOneShotBytes, false},
    {Path::window, "window", make_window, kWindow, kUnlimited, false},
    {Path::push, "push", make_push, kAllReduce, kUnlimited, true},
    {Path::pull, "pull", make_pull, kReaders, kUnlimited, true},
    {Path::staged, "staged", make_staged, kAny, kUnlimited, false},
}};

const PathRow* row_named(std::string_view name) {
  for (const PathRow& r : kPaths)
    if (r.name == name) return &r;
  return nullptr;
}

const PathRow& row_of(Path path) { return kPaths[static_cast<size_t>(path)]; }

/// Of the longest input, which all ranks know: a rank's own may be shorter.
size_t longest_bytes(const Operation& o, int size) {
  Shape shape;
  shape.size = size;
  shape.count = o.count;
  shape.counts = o.counts;
  shape.root = o.root;
  return longest_input(o.kind, shape) * size_of(o.input.dtype);
}

bool fits(Collective kind, size_t longest, const PathRow& row) {
  return (row.kinds & bit(kind)) != 0 && longest <= row.most_bytes;
}

}  // namespace

bool ShmDirect::can_run(const Operation& o) const {
  if (o.algorithm.empty()) return true;
  const PathRow* forced = row_named(o.algorithm);
  return forced != nullptr && fits(o.kind, longest_bytes(o, memory_.size()), *forced) &&
         (memory_.foreign || !forced->by_address);
}

DirectPath& ShmDirect::path(Path which) {
  auto& made = paths_[static_cast<size_t>(which)];
  if (!made) made = row_of(which).make(memory_);
  which_ = which;
  return *made;
}

/// From what all ranks know before they have met; agreed() may prefer the window.
Path ShmDirect::choose(const Operation& o) const {
  if (const PathRow* forced = row_named(o.algorithm)) return forced->path;
  const size_t longest = longest_bytes(o, memory_.size());
  const auto suits = [&](Path which) { return fits(o.kind, longest, row_of(which)); };
  if (suits(Path::lines)) return Path::lines;
  if (suits(Path::one_shot) || memory_.size() == 1) return Path::one_shot;
  for (const Path by_address : {Path::push, Path::pull})
    if (memory_.prefers_foreign && suits(by_address)) return by_address;
  return Path::staged;
}

void ShmDirect::start(const Operation& o, uint32_t) {
  operation_ = &o;
  path_ = nullptr;
  which_ = Path::barrier;
  agreed_ = false;
  if (o.kind == Collective::barrier) return;
  path_ = &path(choose(o));
  path_->start(o);
}

bool ShmDirect::is_path(std::string_view name) { return row_named(name) != nullptr; }

bool ShmDirect::is_by_address(std::string_view name) {
  const PathRow* row = row_named(name);
  return row != nullptr && row->by_address;
}

std::vector<std::string_view> ShmDirect::path_names() {
  std::vector<std::string_view> names;
  for (const PathRow& row : kPaths) names.push_back(row.name);
  return names;
}

std::vector<std::string_view> ShmDirect::paths_for(const Operation& o) const {
  const size_t longest = longest_bytes(o, memory_.size());
  std::vector<std::string_view> names;
  for (const PathRow& row : kPaths)
    if (fits(o.kind, longest, row) && (memory_.foreign || !row.by_address))
      names.push_back(row.name);
  return names;
}

/// one_shot copies on while it waits for the others to post.
bool ShmDirect::agrees_in_data() const { return which_ == Path::lines || which_ == Path::one_shot; }

void ShmDirect::agreed() {
  agreed_ = true;
  choose_by_places();
}

/// Where the buffers lie is known when all have posted.
void ShmDirect::choose_by_places() {
  if ((kWindow & bit(operation_->kind)) == 0) return;
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
  if (which_ == Path::one_shot && !agreed_) {
    if (compare_posts(memory_) != Posts::same)
      return path_->show() ? Progress::moved : Progress::idle;
    agreed();
  }
  return path_ == nullptr ? Progress::finished : path_->poll(until);
}

std::string_view ShmDirect::path_name() const {
  return which_ == Path::barrier ? "barrier" : row_of(which_).name;
}

}  // namespace farandole
