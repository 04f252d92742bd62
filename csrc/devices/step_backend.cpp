#include "devices/step_backend.h"

#include <utility>

#include "base/log.h"
#include "devices/staged_copies.h"
#include "fold/fold.h"

namespace farandole {

StepBackend::StepBackend(const Host& host, const Membership& membership, uint64_t key,
                         std::shared_ptr<DeviceExchange> exchange, OwnBucket mine,
                         size_t piece_bytes, std::string setting, StepWatch& watch)
    : membership_(membership),
      world_rank_(host.rank),
      exchange_(std::move(exchange)),
      piece_bytes_(piece_bytes),
      setting_(std::move(setting)),
      watch_(watch) {
  meeting_.emplace(host, membership_, key, std::move(mine),
                   [this](int member, const CudaShare& theirs, const Fd& descriptor) {
                     exchange_->map(member, theirs, descriptor);
                   });
}

void StepBackend::start(const Operation& operation, uint32_t sequence) {
  operation_ = &operation;
  sequence_ = sequence;
  begun_ = false;
  next_ = 0;
  declined_.clear();
}

Progress StepBackend::poll(TimePoint until) {
  if (meeting_) {
    const bool moved = meeting_->poll();
    if (!join()) return moved ? Progress::moved : Progress::idle;
  }
  if (!begun_) choose();
  if (!declined_.empty()) return Progress::finished;
  try {
    if (!std::exchange(begun_, true)) begin();
    while (next_ < pieces_) {
      run_piece(next_++);
      if (next_ < pieces_ && now() >= until) return Progress::moved;
    }
    end();
  } catch (const Error& error) {
    throw on_rank(error, world_rank_);
  }
  return Progress::finished;
}

/// Whether all have met. What came of it is the same on all of them, and stays so.
bool StepBackend::join() {
  if (!meeting_->done()) return false;
  refusal_ = meeting_->refusal();
  meeting_.reset();
  if (!refusal_.empty())
    log(LogLevel::warning, "arrays on devices go by the host's memory: " + refusal_);
  return true;
}

/// Kernels of ranks that share a device run at once for whoever says so.
bool StepBackend::grants_spinning() const {
  return (operation_->algorithm.empty() ? setting_ : operation_->algorithm) == "spin";
}

/// By what all ranks know.
void StepBackend::choose() {
  const Operation& o = *operation_;
  if (!refusal_.empty()) {
    declined_ = refusal_;
    return;
  }
  const Shape shape = shape_of(o, membership_.rank, static_cast<int>(membership_.members.size()));
  const DeviceQuestion question{
      .kind = o.kind,
      .bytes = amount_of(o.kind, shape) * size_of(o.input.dtype),
      .ranks = shape.size,
      .spin_bytes = exchange_->spin_bytes(grants_spinning()),
      .setting = o.algorithm.empty() ? std::string_view(setting_) : std::string_view(o.algorithm)};
  way_ = choose_device_way(question);
  if (!o.algorithm.empty() && name_of(way_) != o.algorithm)
    declined_ =
        why_not(device_paths()[static_cast<size_t>(*device_way_named(o.algorithm))], question);
  else if (way_ == DeviceWay::staged)
    declined_ = "the way by the host is predicted to be faster";
}

void StepBackend::begin() {
  const Operation& o = *operation_;
  step_ = {.kind = o.kind,
           .shape = shape_of(o, membership_.rank, static_cast<int>(membership_.members.size())),
           .element = size_of(o.input.dtype),
           .piece_bytes = piece_bytes_,
           .in_place = arrays_->input == arrays_->output};
  pieces_ = way_ == DeviceWay::spin ? 1 : pieces_of(step_);
  fold_ = {};
  fold_.input = arrays_->input;
  fold_.output = arrays_->output;
  fold_.dtype = static_cast<int32_t>(o.input.dtype);
  fold_.op = static_cast<int32_t>(o.op);
  if (folds(o.kind)) {
    const Scales scales =
        scales_for(o.input.dtype, o.op, o.prescale, o.postscale, step_.shape.size);
    fold_.leaf_factor = scales.leaf.factor;
    fold_.leaf_divide = scales.leaf.divide;
    fold_.finish_factor = scales.finish.factor;
    fold_.finish_divide = scales.finish.divide;
  }
  exchange_->begin(*arrays_->moments, pieces_);
}

void StepBackend::run_piece(size_t index) {
  if (way_ == DeviceWay::spin) {
    CudaPiece whole = fold_;
    whole.count = operation_->count;
    return exchange_->spin(whole, grants_spinning());
  }
  const StepPiece cut = piece_of(step_, index);
  CudaPiece piece = fold_;
  piece.lane = static_cast<int32_t>(index % kCudaLanes);
  piece.in = cut.in.data();
  piece.ins = cut.in.size();
  piece.out = cut.out.data();
  piece.outs = cut.out.size();
  piece.first = cut.first;
  piece.count = cut.count;
  piece.folds_to_all = cut.to_all;
  piece.fold_to = arrays_->output + cut.fold_to;
  exchange_->run(piece);
}

void StepBackend::end() {
  const Operation& o = *operation_;
  arrays_->number = exchange_->end(*arrays_->moments);
  std::string title = std::string(name_of(o.kind)) + " #" + std::to_string(sequence_);
  if (!o.name.empty()) title += " '" + o.name + "'";
  watch_.add({.number = arrays_->number,
              .title = std::move(title),
              .deadline = o.deadline,
              .timeout = o.timeout,
              .moments = arrays_->moments,
              .kept = std::move(arrays_->kept)});
  arrays_->launched.store(true, std::memory_order_release);  // partner: StepCall::hand_over
}

std::vector<int> StepBackend::lacking() const {
  return meeting_ ? meeting_->silent() : std::vector<int>();
}

}  // namespace farandole
