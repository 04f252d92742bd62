#include "jax/channel.h"

#include <string>

#include "engine/fork.h"

namespace farandole {
namespace {

Error invalid(const std::string& text, const std::string& advice) {
  return Error(ErrorCode::invalid_argument, text, {}, advice);
}

}  // namespace

JaxChannel::JaxChannel(std::shared_ptr<Group> group)
    : group_(std::move(group)),
      stream_(group_->engine()->open_stream(group_->membership(), "jax", kJaxNumber)),
      loans_(group_->engine()->arena()) {}

std::shared_ptr<Flight> JaxChannel::launch(JaxCall call) {
  refuse_in_child();
  if (call.size != group_->size())
    throw invalid("the program was made for " + std::to_string(call.size) + " ranks, and runs on " +
                      std::to_string(group_->size()),
                  "call jax.clear_caches() after joining another world");
  const std::lock_guard lock(launching_);
  take_turn(call);
  auto flight = std::make_shared<Flight>(*group_, std::move(call));
  flight->launch(stream_, loans_);
  return flight;
}

void JaxChannel::take_turn(const JaxCall& call) {
  const uint32_t due = next_.value_or(call.position);
  if (call.position == due) {
    next_ = due + 1;
    return;
  }
  Context where;
  where.rank = group_->members()[static_cast<size_t>(group_->rank())];
  where.operation = name_of(call.kind);
  where.tensor = call.options.name;
  const Error error(ErrorCode::invalid_argument,
                    where.operation + " '" + where.tensor + "' on rank " +
                        std::to_string(where.rank) + " is out of order: it comes as call " +
                        std::to_string(call.position) + ", and " + std::to_string(due) + " is next",
                    where, "run programs with collectives from one Python thread");
  group_->abort(error);
  throw error;
}

void JaxChannel::begin_anew() {
  const std::lock_guard lock(launching_);
  next_.reset();
}

void JaxChannel::note(const Error& error) {
  const std::lock_guard lock(error_mutex_);
  last_error_ = error;
}

std::optional<Error> JaxChannel::last_error() const {
  const std::lock_guard lock(error_mutex_);
  return last_error_;
}

}  // namespace farandole
