#include "fusion/reducer.h"

#include <algorithm>
#include <cstring>

#include "fold/fold.h"

namespace farandole {
namespace {

std::vector<std::byte> pack(const Parameter& p) {
  std::vector<std::byte> row(256);
  const std::string text =
      p.name.substr(0, 200) + '\0' + std::to_string(p.count) + " " + std::string(name_of(p.dtype));
  std::memcpy(row.data(), text.data(), std::min(text.size(), row.size() - 1));
  return row;
}

std::string unpack(const std::byte* row) {
  const auto* text = reinterpret_cast<const char*>(row);
  const std::string name = text;
  return "'" + name + "' (" + std::string(text + name.size() + 1) + ")";
}

}  // namespace

Reducer::Reducer(std::shared_ptr<Group> group, std::vector<Parameter> in_ready_order,
                 ReducerOptions options)
    : group_(std::move(group)),
      options_(std::move(options)),
      parameters_(std::move(in_ready_order)),
      buckets_(plan_buckets(parameters_, options_.limits)),
      where_(parameters_.size()) {
  for (const Parameter& p : parameters_)
    if (!has_meaning(options_.op, p.dtype))
      throw Error(ErrorCode::invalid_argument, std::string(name_of(options_.op)) +
                                                   " has no meaning on parameter '" + p.name +
                                                   "' of dtype " + std::string(name_of(p.dtype)));
  compare_plans();
  for (size_t b = 0; b < buckets_.size(); ++b) {
    memory_.push_back(group_->allocate(buckets_[b].bytes()));
    for (const Placement& item : buckets_[b].items)
      where_[static_cast<size_t>(item.parameter)] = {b, item.offset * size_of(buckets_[b].dtype)};
  }
  stream_ = group_->open_stream(options_.label);
  used_.resize(parameters_.size() + static_cast<size_t>(group_->size()));
  steps_ = TraceSteps(group_->engine()->trace(), options_.label, stream_->key());
  handles_.reserve(buckets_.size() + 1);
  reset();
}

Reducer::~Reducer() {
  // Buckets may still be written to; their memory outlives the operations in flight.
  try {
    for (const Handle& h : handles_) h.wait(Deadline::after(std::chrono::seconds(5)));
  } catch (const Error&) {  // NOLINT: a failed group has nobody inside its memory any more
  }
}

void Reducer::compare_plans() {
  const int size = group_->size();
  const auto gather = [&](const void* mine, size_t bytes, std::byte* all) {
    Options o;
    o.name = "plan of " + options_.label;
    auto* in = const_cast<std::byte*>(static_cast<const std::byte*>(mine));
    group_
        ->submit(Collective::all_gather, {in, bytes, DType::uint8},
                 {all, bytes * static_cast<size_t>(size), DType::uint8}, o, true)
        .wait();
  };
  const uint64_t mine[] = {fingerprint(parameters_, buckets_), parameters_.size()};
  std::vector<uint64_t> all(2 * static_cast<size_t>(size));
  gather(mine, sizeof mine, reinterpret_cast<std::byte*>(all.data()));
  bool same = true;
  size_t longest = 0;
  for (size_t r = 0; r < static_cast<size_t>(size); ++r) {
    same = same && all[2 * r] == mine[0];
    longest = std::max<size_t>(longest, all[2 * r + 1]);
  }
  if (same) return;
  for (size_t i = 0; i < longest; ++i) {
    const auto row = i < parameters_.size() ? pack(parameters_[i]) : std::vector<std::byte>(256);
    std::vector<std::byte> rows(256 * static_cast<size_t>(size));
    gather(row.data(), row.size(), rows.data());
    std::vector<std::pair<std::string, std::vector<int>>> values;
    for (int r = 0; r < size; ++r) {
      const std::byte* theirs = rows.data() + 256 * static_cast<size_t>(r);
      const std::string text = theirs[0] == std::byte{0} ? "no parameter" : unpack(theirs);
      auto it = std::find_if(values.begin(), values.end(),
                             [&](const auto& v) { return v.first == text; });
      if (it == values.end()) it = values.insert(values.end(), {text, {}});
      it->second.push_back(r);
    }
    if (values.size() < 2) continue;
    Context where;
    where.field = "parameter " + std::to_string(i);
    where.operation = "plan of " + options_.label;
    where.tensor = i < parameters_.size() ? parameters_[i].name : "";
    std::string verdict =
        "ranks train different models: parameter " + std::to_string(i) + " (in ready order) is ";
    for (size_t v = 0; v < values.size(); ++v)
      verdict +=
          (v > 0 ? "; " : "") + values[v].first + " on ranks " + describe_ranks(values[v].second);
    where.values = std::move(values);
    throw Error(ErrorCode::mismatch, verdict, std::move(where),
                "build the same model, with the same trainable parameters, on every rank");
  }
  throw Error(ErrorCode::mismatch, "ranks use different bucket sizes for " + options_.label, {},
              "set FARANDOLE_BUCKET_BYTES alike on every rank");
}

std::byte* Reducer::place(int parameter) const {
  const Where& w = where_[static_cast<size_t>(parameter)];
  return memory_[w.bucket].get() + w.offset;
}

void Reducer::mark_ready(int parameter, const std::byte* gradient) {
  const auto i = static_cast<size_t>(parameter);
  const Parameter& p = parameters_[i];
  {
    const std::lock_guard lock(mutex_);
    if (rest_launched_ || marked_[i] != 0)
      throw Error(ErrorCode::invalid_argument,
                  "the gradient of '" + p.name + "' became ready twice in one step", {},
                  "call step() or zero_grad() between two backward passes, or ask for "
                  "accumulation (backward_passes_per_step)");
    steps_.open();
    marked_[i] = 1;
    ++marked_count_;
  }
  const TraceSpan ready(group_->engine()->trace(), TraceKind::ready, p.name,
                        p.count * size_of(p.dtype));
  scale(place(parameter), gradient, p.count, p.dtype, {options_.prescale, 1});
  const std::lock_guard lock(mutex_);
  --missing_[where_[i].bucket];
  if (options_.overlap) launch_complete();
}

void Reducer::launch_complete() {
  while (launched_ < buckets_.size() && missing_[launched_] == 0) launch(launched_);
}

void Reducer::launch(size_t b) {
  const Bucket& bucket = buckets_[b];
  const Buffer whole{memory_[b].get(), bucket.count, bucket.dtype};
  Options o;
  o.op = options_.op;
  o.postscale = options_.postscale;
  o.keepalive = memory_[b];
  o.name = "bucket " + std::to_string(b);
  handles_.push_back(
      group_->submit_to(stream_, Collective::all_reduce, whole, whole, std::move(o)));
  ++launched_;
}

void Reducer::launch_flags() {
  const Buffer flags{reinterpret_cast<std::byte*>(used_.data()), used_.size(), DType::uint8};
  Options o;
  o.op = ReduceOp::max;
  o.name = "used";
  handles_.push_back(
      group_->submit_to(stream_, Collective::all_reduce, flags, flags, std::move(o)));
}

void Reducer::launch_rest() {
  const std::lock_guard lock(mutex_);
  if (rest_launched_) return;
  steps_.open();
  for (size_t i = 0; i < parameters_.size(); ++i) {
    used_[i] = marked_[i];
    if (marked_[i] != 0) continue;
    std::memset(place(static_cast<int>(i)), 0,
                parameters_[i].count * size_of(parameters_[i].dtype));
    --missing_[where_[i].bucket];
  }
  launch_complete();
  launch_flags();
  rest_launched_ = true;
}

bool Reducer::wait(Deadline until) {
  const TraceSpan waiting(group_->engine()->trace(), TraceKind::final_wait, options_.label);
  launch_rest();
  const TimePoint begin = now();
  try {
    for (const Handle& h : handles_)
      if (!h.wait(until)) return false;
  } catch (...) {
    reset();
    throw;
  }
  blocked_seconds_ += seconds(now() - begin);
  std::vector<int> quitters;
  for (int r = 0; r < group_->size(); ++r)
    if (used_[parameters_.size() + static_cast<size_t>(r)] != 0)
      quitters.push_back(group_->members()[static_cast<size_t>(r)]);
  reset();
  if (quitters.empty()) return true;
  Context where;
  where.rank = quitters.front();
  where.operation = options_.label;
  where.values = {{"abandoned", quitters}};
  throw Error(ErrorCode::remote_error,
              "backward was abandoned on rank" + std::string(quitters.size() > 1 ? "s " : " ") +
                  describe_ranks(quitters) + "; this step's gradients are incomplete",
              std::move(where),
              "look at the error on that rank; skip this step on every rank, or restart");
}

void Reducer::abandon() {
  used_[parameters_.size() + static_cast<size_t>(group_->rank())] = 1;
  launch_rest();
  try {
    wait({});
  } catch (const Error& error) {
    if (error.code() != ErrorCode::remote_error) throw;  // that it was abandoned is known here
  }
}

void Reducer::reset() {
  const std::lock_guard lock(mutex_);
  steps_.close();
  marked_.assign(parameters_.size(), 0);
  missing_.assign(buckets_.size(), 0);
  for (size_t b = 0; b < buckets_.size(); ++b) missing_[b] = buckets_[b].items.size();
  std::fill(used_.begin() + static_cast<std::ptrdiff_t>(parameters_.size()), used_.end(), 0);
  marked_count_ = 0;
  launched_ = 0;
  rest_launched_ = false;
  handles_.clear();
}

}  // namespace farandole
