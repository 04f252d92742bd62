#include "devices/step_backend.h"

#include <algorithm>
#include <cstring>
#include <utility>

#include "base/fixed_text.h"
#include "base/log.h"
#include "devices/nccl_plan.h"
#include "devices/staged_copies.h"
#include "schedule/cut.h"

namespace farandole {
namespace {

constexpr auto kSoon = std::chrono::milliseconds(1);
// The number of the meeting for NCCL, within the steps.
constexpr uint64_t kNcclNumber = 1;

bool needs_parting(const PeerOffer& bucket) {
  BucketOffer offer;
  std::memcpy(&offer, bucket.data.data(), sizeof offer);
  return offer.by_handle;
}

}  // namespace

StepBackend::StepBackend(const Engine& engine, const Membership& membership, uint64_t key,
                         std::shared_ptr<DeviceExchange> exchange, PeerOffer bucket,
                         std::string no_buckets, StepWatch& watch)
    : engine_(engine),
      membership_(membership),
      stream_(key),
      key_(stream_key(key, kStepsNumber)),
      exchange_(std::move(exchange)),
      piece_bytes_(engine.options().device_bucket_bytes),
      watch_(watch),
      no_buckets_(std::move(no_buckets)),
      must_part_(needs_parting(bucket)) {
  if (engine.options().wire != Wire::plain && !engine.host().are_here(membership.members))
    no_nccl_ = "goes over connections that are not sealed, as FARANDOLE_WIRE asks for";
  if (!no_buckets_.empty()) return;
  meeting_.emplace(
      engine.host(), membership_, key_, std::move(bucket),
      [this](std::span<const PeerOffered> all) {
        switched_ = true;
        for (const PeerOffered& theirs : all) {
          const auto offer = theirs.get<BucketOffer>();
          must_part_ |= offer.by_handle;
          switched_ &= offer.multicast;
        }
        exchange_->map_all(membership_.rank, all);
      },
      [this] { return exchange_->check_links(); });
}

void StepBackend::start(const Operation& operation, uint32_t sequence) {
  operation_ = &operation;
  sequence_ = sequence;
  begun_ = false;
  crowded_since_ = {};
  next_ = 0;
  declined_.clear();
}

Progress StepBackend::poll(TimePoint until) {
  if (left_) throw left_world();
  if (meeting_) {
    const bool moved = meeting_->poll();
    if (!have_met()) return moved ? Progress::moved : Progress::idle;
  }
  if (!begun_) choose();
  if (!declined_.empty()) return Progress::finished;
  try {
    if (way_ == DeviceWay::nccl && !begun_) {
      const bool moved = meet_in_nccl();
      if (!nccl_->done()) return moved ? Progress::moved : Progress::idle;
      if (!no_nccl_.empty()) return Progress::moved;  // and is chosen for again
    }
    if (!begun_) {
      if (!exchange_->has_room()) return wait_for_room();
      begun_ = true;
      begin();
    }
    while (next_ < count_) {
      if (!exchange_->has_room()) return wait_for_room();
      crowded_since_ = {};
      run_piece(next_++);
      if (next_ < count_ && has_come(until)) return Progress::moved;
    }
    // A launch that NCCL leaves to a thread of its own takes microseconds, but for the first.
    if (!is_launched()) return now() - asked_nccl_ < kSoon ? Progress::moved : Progress::idle;
    end();
  } catch (const Error& error) {
    throw on_rank(error, engine_.host().rank);
  }
  return Progress::finished;
}

/// The device makes room soon, unless it waits for another rank's.
Progress StepBackend::wait_for_room() {
  const TimePoint when = now();
  if (crowded_since_ == TimePoint{}) crowded_since_ = when;
  return when - crowded_since_ < kSoon ? Progress::moved : Progress::idle;
}

/// The meeting's outcome is the same on all ranks, and final.
bool StepBackend::have_met() {
  if (!meeting_->done()) return false;
  no_buckets_ = meeting_->refusal();
  if (no_buckets_.empty()) exchange_->heed(meeting_->notes());
  end_meeting();
  if (!no_buckets_.empty())
    log(LogLevel::warning, "collectives on devices have no steps: " + no_buckets_);
  return true;
}

void StepBackend::end_meeting() {
  if (must_part_) parting_ = meeting_->parting();
  meeting_.reset();
}

void StepBackend::stop_meeting() {
  if (!meeting_) return;
  no_buckets_ = "a rank has left its devices";
  end_meeting();
}

void StepBackend::leave() {
  left_ = true;
  in_part_ = false;
  stop_meeting();
}

/// For this operation or for all.
DeviceAsked StepBackend::asked() const {
  return device_asked(operation_->algorithm, engine_.options().device_path);
}

/// Whether anything has moved.
bool StepBackend::meet_in_nccl() {
  if (!nccl_) {
    const Connect connect =
        engine_.options().channels(engine_, membership_, stream_key(key_, kNcclNumber));
    nccl_.emplace(engine_.host(), membership_, connect, exchange_, is_asked(DeviceWay::nccl));
  }
  const bool moved = nccl_->poll();
  if (nccl_->done()) no_nccl_ = nccl_->refusal();
  return moved;
}

/// Whether it was asked for. Then kernels of ranks that share a device may count on running at
/// once.
bool StepBackend::is_asked(DeviceWay way) const { return asked().way == name_of(way); }

/// Arrays that travel as one are brought together in the bucket first.
size_t StepBackend::spin_bytes() const {
  if (!no_buckets_.empty()) return 0;
  const size_t most = exchange_->spin_bytes(is_asked(DeviceWay::spin));
  return arrays_->together.empty() ? most : std::min(most, piece_bytes_);
}

Shape StepBackend::shape_here() const {
  return shape_of(*operation_, membership_.rank, static_cast<int>(membership_.members.size()));
}

/// With the factor of its arrays.
CollectiveSpec StepBackend::spec_here() const {
  CollectiveSpec spec = *operation_;
  spec.prescale *= arrays_->prescale;
  return spec;
}

/// Decides by what all ranks know, so all choose alike.
void StepBackend::choose() {
  const Operation& o = *operation_;
  if (!arrays_->updates.empty()) {  // in one way or not at all
    way_ = DeviceWay::step;
    declined_ = no_buckets_;
    return;
  }
  DeviceQuestion question = question_of(spec_here(), o.input.dtype, o.level, shape_here(), asked());
  question.no_buckets = no_buckets_;
  question.no_nccl = no_nccl_;
  question.switched = switched_;
  question.spin_bytes = spin_bytes();
  question.staged_piece = engine_.options().staged_piece_bytes;
  question.apart = !arrays_->together.empty();
  question.take_turns = no_buckets_.empty() && exchange_->take_turns();
  if (no_buckets_.empty()) question.lanes = exchange_->lane_room(is_asked(DeviceWay::lanes));
  way_ = choose_device_way(question);
  if (way_ == DeviceWay::lanes) {
    planner_ = lanes_planner(question);
    lane_room_ = question.lanes;
  }
  if (const auto named = device_way_named(o.algorithm); named && way_ != *named)
    declined_ = why_not(device_paths()[static_cast<size_t>(*named)], question);
  else if (way_ == DeviceWay::staged)
    declined_ = no_buckets_.empty() ? "the way by the host is predicted to be faster" : no_buckets_;
}

/// Lanes cut the whole, and no shares.
bool StepBackend::goes_in_pieces() const {
  if (way_ == DeviceWay::lanes) return is_cut_by_elements(operation_->kind);
  return way_ == DeviceWay::step;
}

void StepBackend::begin() {
  const bool lanes = way_ == DeviceWay::lanes;
  pieces_ = StepPieces(*operation_, shape_here(), *arrays_,
                       lanes ? lane_room_.piece_bytes : piece_bytes_);
  count_ = goes_in_pieces() ? pieces_.size() : 1;
  exchange_->begin(*arrays_->moments, lanes ? 1 : count_);
  watch_.add(in_flight());
  in_part_ = true;
}

StepInFlight StepBackend::in_flight() {
  const Operation& o = *operation_;
  Trace* const trace = engine_.trace();
  return {.number = std::nullopt,
          .title = title_of(o, sequence_),
          .trace = trace,
          .shown = trace != nullptr ? shown_in(*trace) : TraceEvent{},
          .deadline = o.deadline,
          .timeout = o.timeout,
          .way = way_,
          .moments = arrays_->moments,
          .kept = std::move(arrays_->kept)};
}

void StepBackend::run_piece(size_t index) {
  if (way_ == DeviceWay::nccl) return run_nccl();
  if (way_ == DeviceWay::lanes) return run_lanes(index);
  if (way_ == DeviceWay::spin && !pieces_.lie_apart())
    return exchange_->spin(pieces_.whole(), is_asked(way_));
  CudaPiece piece = pieces_[index];
  piece.strand = static_cast<int32_t>(index % kCudaStrands);
  if (way_ == DeviceWay::step) return exchange_->run(piece);
  piece.count = operation_->count;
  exchange_->spin(piece, is_asked(way_));
}

/// A piece of the whole is a collective of its own; kernels of one operation follow each other.
void StepBackend::run_lanes(size_t index) {
  const CudaPiece piece = pieces_.stretch(index);
  const size_t element = size_of(operation_->input.dtype);
  Shape shape = pieces_.shape();
  shape.count = piece.count;
  shape = lanes_shape(operation_->kind, shape, element, lane_room_);
  const bool is_whole = counts_of(operation_->kind, 1) == 0;  // else shares lie as they do
  exchange_->run_lanes({.planner = std::string(planner_->name),
                        .kind = operation_->kind,
                        .count = shape.count,
                        .counts = {shape.counts.begin(), shape.counts.end()},
                        .root = shape.root,
                        .lanes = shape.lanes,
                        .segments = shape.segments,
                        .grain = is_whole ? static_cast<uint32_t>(16 / element) : 1},
                       piece, is_asked(way_));
}

/// Arrays that travel together are operations of NCCL's that run as one.
void StepBackend::run_nccl() {
  const CollectiveSpec o = spec_here();
  const DType dtype = operation_->input.dtype;
  const bool scales = nccl_->scales_results();
  NcclPlan plan = nccl_plan(o, pieces_.shape(), dtype, arrays_->input, arrays_->output, scales);
  if (pieces_.lie_apart()) plan.calls.clear();
  for (const auto& [input, output] : arrays_->together) {
    const Shape shape{.rank = pieces_.shape().rank,
                      .size = pieces_.shape().size,
                      .count = input.count,
                      .root = pieces_.shape().root};
    const NcclPlan one = nccl_plan(o, shape, dtype, reinterpret_cast<uint64_t>(input.data),
                                   reinterpret_cast<uint64_t>(output.data), scales);
    plan.calls.insert(plan.calls.end(), one.calls.begin(), one.calls.end());
  }
  asked_nccl_ = now();
  exchange_->run_nccl(std::move(plan));
}

/// Whether all of it is in the streams.
bool StepBackend::is_launched() { return way_ != DeviceWay::nccl || exchange_->nccl_ready(); }

/// The trace event of the operation on the device, without its times.
TraceEvent StepBackend::shown_in(Trace& trace) {
  if (std::exchange(traced_, &trace) != &trace)
    track_ = trace.track("device " + std::to_string(exchange_->ordinal()), stream_);
  const Operation& o = *operation_;
  TraceEvent event;
  event.kind = TraceKind::device;
  event.track = track_;
  event.sequence = sequence_;
  event.bytes = o.input.count > 0 ? o.input.bytes() : o.output.bytes();
  copy_cut(name_of(o.kind), event.label);
  copy_cut(name_of(way_), event.path);
  copy_cut(o.name, event.name);
  return event;
}

void StepBackend::end() {
  arrays_->number = exchange_->end(*arrays_->moments);
  in_part_ = false;
  watch_.launched(arrays_->number);
  arrays_->launched.store(
      true, std::memory_order_release);  // partner: StepCall::launched, BucketOnDevice::launched
}

std::vector<int> StepBackend::lacking() const {
  if (meeting_) return meeting_->silent();
  return nccl_ ? nccl_->silent() : std::vector<int>();
}

/// NCCL is aborted, since a meeting or a launch would go on waiting for the other ranks.
void StepBackend::abort() noexcept {
  operation_ = nullptr;
  if (exchange_ && ((nccl_ && !nccl_->done()) || (begun_ && way_ == DeviceWay::nccl)))
    exchange_->abort_nccl();
  if (std::exchange(in_part_, false)) end_in_part();
}

/// The launched part comes to its end as earlier operations do. Its arrays are kept so long.
void StepBackend::end_in_part() noexcept {
  try {
    watch_.launched(exchange_->end(*arrays_->moments));
  } catch (const std::exception&) {  // NOLINT: the operation has failed already
    watch_.drop_newest();
  }
}

}  // namespace farandole
