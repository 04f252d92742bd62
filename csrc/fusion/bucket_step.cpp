#include "fusion/bucket_step.h"

#include <utility>

#include "stream/bytes_begun.h"

namespace farandole {

std::vector<BucketPlace> places_of(const std::vector<Bucket>& buckets, size_t parameters) {
  std::vector<BucketPlace> places(parameters);
  for (size_t b = 0; b < buckets.size(); ++b)
    for (const Placement& item : buckets[b].placements)
      places[static_cast<size_t>(item.parameter)] = {b, item.offset * size_of(buckets[b].dtype)};
  return places;
}

BucketStep::BucketStep(std::shared_ptr<Group> group, std::string label)
    : group_(std::move(group)),
      label_(std::move(label)),
      stream_(group_->open_stream(label_)),
      trace_(label_, stream_->key()) {}

BucketStep::~BucketStep() {
  try {
    for (const Handle& h : in_flight_) h.wait(Deadline::after(std::chrono::seconds(5)));
  } catch (const Error&) {  // NOLINT: a failed group has nobody inside its memory any more
  }
}

void BucketStep::launch(const std::string& name, Options what, Buffer input, Buffer output,
                        std::shared_ptr<const void> memory) {
  what.name = name;
  what.keepalive = std::move(memory);
  bytes_begun_in_steps.fetch_add(input.bytes(), std::memory_order_relaxed);
  in_flight_.push_back(group_->submit_to(stream_, input, output, std::move(what)));
}

void BucketStep::launch_weights() {
  if (auto handle = weights_.launch(*group_, stream_)) in_flight_.push_back(std::move(*handle));
}

bool BucketStep::wait(Deadline until, std::optional<Error>& first) {
  if (!wait_for_all(in_flight_, until, first)) return false;
  in_flight_.clear();
  return true;
}

std::vector<int> BucketStep::quitters(const uint8_t* flags) const {
  std::vector<int> ranks;
  for (int r = 0; r < group_->size(); ++r)
    if (flags[r] == kAbandoned) ranks.push_back(group_->members()[static_cast<size_t>(r)]);
  return ranks;
}

void BucketStep::refuse(const std::vector<int>& quitters, const std::string& what,
                        const std::string& so) const {
  Context where;
  where.rank = quitters.front();
  where.operation = label_;
  where.values = {{"abandoned", quitters}};
  throw Error(ErrorCode::remote_error,
              what + " was abandoned on " + name_ranks(quitters) + "; " + so, std::move(where),
              "look at the error on that rank; skip this step on every rank, or restart");
}

}  // namespace farandole
