#include "backends/schedule_backend.h"

#include <algorithm>
#include <string>
#include <utility>

#include "base/error.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

// Enough for the buckets of a model and the odd metric; one plan is some kilobytes.
constexpr size_t kPlansKept = 64;

// Longer data have left their readers' caches before they are overwritten.
constexpr size_t kLongestPut = 2 << 20;

/// The other collectives do not overwrite what peers have read.
bool puts(const Operation& operation) {
  return operation.kind == Collective::all_reduce && operation.input.bytes() <= kLongestPut;
}

/// A barrier moves tokens of one byte and has no data of its own.
DType dtype_of(const Operation& operation) {
  return operation.kind == Collective::barrier ? DType::uint8 : operation.input.dtype;
}

std::vector<int> peers_of(const Schedule& schedule, int rank) {
  std::vector<int> peers;
  for (const Lane& lane : schedule.lanes)
    for (const Step& step : lane)
      for (const int peer : {step.to, step.from})
        if (peer != kNobody && peer != rank) peers.push_back(peer);
  std::ranges::sort(peers);
  // Not std::ranges::unique: clang 14 cannot compile what g++ 12's library returns from it.
  peers.erase(std::unique(peers.begin(), peers.end()), peers.end());
  return peers;
}

/// Elements: of the share or block where each is moved for itself, else all of the data.
size_t largest_transfer(Collective kind, const Shape& shape) {
  switch (kind) {
    case Collective::all_gather:
    case Collective::gather:
    case Collective::scatter:
    case Collective::all_to_all:
      return largest_share(kind, shape);
    case Collective::reduce_scatter:
      return all_shares(kind, shape);
    default:
      return shape.count;
  }
}

}  // namespace

Split default_split(size_t bytes, const ChannelCosts& costs) {
  // Long enough to hide a step's fixed cost, short enough to be still in cache when passed on.
  constexpr size_t kSegment = 256 * 1024;
  constexpr size_t kMostSegments = 16;
  const int lanes = bytes >= costs.second_lane ? costs.lanes : 1;
  const size_t segments = bytes / static_cast<size_t>(lanes) / kSegment;
  return {lanes, static_cast<int>(std::clamp<size_t>(segments, 1, kMostSegments))};
}

// ---- scratch ----

std::byte* Scratch::at_least(size_t bytes) {
  if (bytes <= bytes_) return data_;
  release();
  if (arena_) {
    data_ = arena_->allocate(bytes);
  } else {
    heap_ = std::make_unique_for_overwrite<std::byte[]>(bytes);
    data_ = heap_.get();
  }
  bytes_ = bytes;
  return data_;
}

void Scratch::keep_for_ever() {
  new auto(std::move(arena_));  // and so the segment that it is in
  static_cast<void>(heap_.release());
  data_ = nullptr;
  bytes_ = 0;
}

void Scratch::release() {
  if (arena_ && data_) arena_->release(data_);
  heap_.reset();
  data_ = nullptr;
  bytes_ = 0;
}

// ---- what to run ----

ScheduleBackend::ScheduleBackend(ScheduleGroup group, Connect connect, std::shared_ptr<Arena> arena,
                                 ChannelCosts costs, const StreamMemory* memory)
    : group_(std::move(group)),
      connect_(std::move(connect)),
      costs_(costs),
      memory_(memory),
      scratch_(std::move(arena)),
      connecting_(static_cast<size_t>(group_.size)),
      channels_(kMaxLanes) {
  for (auto& lane : channels_) lane.resize(static_cast<size_t>(group_.size));
}

Shape ScheduleBackend::shape_of(const Operation& operation) const {
  Shape shape = farandole::shape_of(operation, group_.rank, group_.size);
  shape.host_of = group_.host_of;
  require_valid(operation.kind, shape);
  const size_t element = size_of(dtype_of(operation));
  const Split split = default_split(largest_transfer(operation.kind, shape) * element, costs_);
  shape.lanes = split.lanes;
  shape.segments = split.segments;
  return shape;
}

bool ScheduleBackend::can_run(const Operation& operation) const {
  if (is_between_two(operation.kind)) return true;
  if (folds(operation.kind) && !has_meaning(operation.op, operation.input.dtype)) return false;
  const std::string& wanted = operation.algorithm;
  if (wanted.empty() || wanted == name())
    return std::ranges::any_of(
        planners(), [&](const Planner& planner) { return planner.collective == operation.kind; });
  const Planner* planner = find_planner(operation.kind, wanted);
  return planner != nullptr && is_allowed(*planner, shape_of(operation), operation.level);
}

void ScheduleBackend::refuse(const Operation& o) const {
  require_planner(o.kind, o.algorithm, shape_of(o), o.level);
}

const Planner& ScheduleBackend::planner_of(const Operation& operation, const Shape& shape) const {
  if (operation.algorithm.empty() || operation.algorithm == name())
    return choose_planner(operation.kind, shape, size_of(dtype_of(operation)), operation.level,
                          costs_);
  return require_planner(operation.kind, operation.algorithm, shape, operation.level);
}

double ScheduleBackend::predicted_seconds(const Operation& operation) const {
  const Shape shape = shape_of(operation);
  return farandole::predicted_seconds(cost_of(planner_of(operation, shape), shape),
                                      size_of(dtype_of(operation)), costs_);
}

const ScheduleBackend::Plan& ScheduleBackend::plan_for(const Operation& operation) {
  Question question{
      operation.kind,  operation.algorithm, operation.level, size_of(dtype_of(operation)),
      operation.count, operation.counts,    operation.root};
  const auto known = std::ranges::find(plans_, question, &Plan::question);
  if (known != plans_.end()) {
    plans_.splice(plans_.begin(), plans_, known);
    return plans_.front();
  }
  const Shape shape = shape_of(operation);
  Schedule schedule = is_between_two(operation.kind) ? plan_between_two(shape)
                                                     : planner_of(operation, shape).plan(shape);
  std::vector<int> peers = peers_of(schedule, group_.rank);
  plans_.push_front({std::move(question), std::move(schedule), std::move(peers)});
  if (plans_.size() > kPlansKept) plans_.pop_back();
  return plans_.front();
}

// ---- running it ----

void ScheduleBackend::start(const Operation& operation, uint32_t sequence) {
  if (aborted_)
    throw Error(ErrorCode::aborted, "this group's channels were closed by an earlier failure");
  plan_ = &plan_for(operation);
  const bool scaled = folds(operation.kind);
  const DType dtype = dtype_of(operation);
  work_ = {.rank = group_.rank,
           .input = operation.input.data,
           .output = operation.output.data,
           .scratch = scratch_.at_least(plan_->schedule.scratch * size_of(dtype)),
           .dtype = dtype,
           .op = operation.op,
           .scales = scaled ? scales_for(dtype, operation.op, operation.prescale,
                                         operation.postscale, group_.size)
                            : Scales{},
           .memory = puts(operation) ? memory_ : nullptr};
  operation_ = &operation;
  sequence_ = sequence;
  lanes_begun_ = false;
}

Progress ScheduleBackend::poll(TimePoint until) {
  if (operation_ == nullptr) return Progress::idle;
  bool moved = false;
  if (!lanes_begun_) {
    if (!connect(moved)) return moved ? Progress::moved : Progress::idle;
    begin_lanes();
    moved = true;
  }
  do {
    const Progress round = poll_lanes(until);
    if (round == Progress::finished) {
      forget();
      return Progress::finished;
    }
    if (round == Progress::idle) break;
    moved = true;
  } while (!has_come(until));
  return moved ? Progress::moved : Progress::idle;
}

/// Stays with a lane while it moves: what it has folded is passed on while it is hot. Goes on where
/// the clock stopped it.
Progress ScheduleBackend::poll_lanes(TimePoint until) {
  bool moved = false;
  for (size_t idle = 0; idle < cursors_.size();) {
    const size_t lane = next_lane_;
    const Progress progress = lane_finished_[lane] ? Progress::idle : poll_lane(lane);
    if (progress == Progress::finished) {
      lane_finished_[lane] = true;
      --lanes_left_;
    }
    if (progress != Progress::moved) next_lane_ = (next_lane_ + 1) % cursors_.size();
    idle = progress == Progress::idle ? idle + 1 : 0;
    if (progress == Progress::idle) continue;
    moved = true;
    if (has_come(until)) break;
  }
  if (lanes_left_ == 0) return Progress::finished;
  return moved ? Progress::moved : Progress::idle;
}

Progress ScheduleBackend::poll_lane(size_t lane) {
  try {
    return cursors_[lane].poll();
  } catch (const Error& error) {
    rethrow(error, lane);
  }
}

/// True when every rank the plan names is connected. All begin at once, so nobody waits for a
/// chain of others.
bool ScheduleBackend::connect(bool& moved) {
  bool all = true;
  for (const int rank : plan_->peers) {
    const auto index = static_cast<size_t>(rank);
    if (channels_[0][index]) continue;
    if (!connecting_[index]) connecting_[index] = connect_(rank, kMaxLanes);
    std::vector<std::unique_ptr<Channel>> channels = connecting_[index]->poll(now());
    if (channels.empty()) {
      all = false;
      continue;
    }
    for (size_t lane = 0; lane < channels.size(); ++lane)
      channels_[lane][index] = std::move(channels[lane]);
    connecting_[index].reset();
    moved = true;
  }
  return all;
}

std::vector<int> ScheduleBackend::lacking() const {
  std::vector<int> ranks;
  if (plan_ == nullptr) return ranks;
  if (!lanes_begun_)
    std::ranges::copy_if(plan_->peers, std::back_inserter(ranks),
                         [&](int r) { return !channels_[0][static_cast<size_t>(r)]; });
  for (const LaneCursor& cursor : cursors_) cursor.add_lacking(ranks);
  std::ranges::sort(ranks);
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  return ranks;
}

void ScheduleBackend::begin_lanes() {
  const std::vector<Lane>& lanes = plan_->schedule.lanes;
  cursors_.clear();
  for (size_t lane = 0; lane < lanes.size(); ++lane)
    cursors_.emplace_back(work_, lanes[lane], channels_[lane]);
  lane_finished_.assign(lanes.size(), false);
  lanes_left_ = lanes.size();
  next_lane_ = 0;
  lanes_begun_ = true;
}

/// The same error, with facts that are known only here: the operation and where its lane stopped.
void ScheduleBackend::rethrow(const Error& error, size_t lane) const {
  const LaneCursor& cursor = cursors_[lane];
  Context where = error.where();
  where.operation = name_of(operation_->kind);
  where.tensor = operation_->name;
  where.sequence = sequence_;
  if (where.peer == kNobody) where.peer = cursor.peer();
  where.lane = static_cast<int>(lane);
  where.step = static_cast<int>(cursor.step());
  where.bytes_done = cursor.bytes_done();
  where.bytes_total = cursor.bytes_total();
  where.evidence += (where.evidence.empty() ? "lane " : "; lane ") + std::to_string(lane) +
                    " stopped at step " + std::to_string(cursor.step()) + " of " +
                    std::to_string(cursor.steps()) + ", " + std::to_string(where.bytes_done) +
                    " of " + std::to_string(where.bytes_total) + " bytes (seen by rank " +
                    std::to_string(group_.rank) + ")";
  throw Error(error.code(), error.verdict(), where, error.advice());
}

void ScheduleBackend::forget() {
  operation_ = nullptr;
  plan_ = nullptr;
  cursors_.clear();
  lanes_begun_ = false;
}

void ScheduleBackend::abort() noexcept {
  const bool in_flight = lanes_begun_;
  forget();
  if (!in_flight) return;
  for (auto& connecting : connecting_) connecting.reset();
  aborted_ = true;
}

Held ScheduleBackend::let_go() noexcept {
  if (!aborted_) return Held::no;
  Held held = Held::no;
  for (auto& lane : channels_)
    for (auto& channel : lane)
      if (channel) held = std::max(held, channel->let_go());
  if (held == Held::for_now) return held;
  if (held == Held::for_ever) scratch_.keep_for_ever();
  for (auto& lane : channels_)
    for (auto& channel : lane) channel.reset();
  return held;
}

}  // namespace farandole
