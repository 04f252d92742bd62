#include "jax/channel.h"

#include <string>

#include "engine/fork.h"

namespace farandole {
namespace {

Error invalid(const std::string& text, const std::string& advice) {
  return Error(ErrorCode::invalid_argument, text, {}, advice);
}

}  // namespace

JaxChannel::JaxChannel(std::shared_ptr<Group> world) : world_(std::move(world)) { know({}); }

JaxChannel::SetStream JaxChannel::open(const std::string& ranks, std::shared_ptr<Group> group) {
  const std::string label = ranks.empty() ? "jax" : "jax " + ranks;
  auto stream = group->engine()->open_stream(group->membership(), label, kJaxNumber);
  return {std::move(group), std::move(stream)};
}

void JaxChannel::know(const Sets& sets) {
  const std::lock_guard lock(launching_);
  Sets wanted = sets;
  wanted[""] = world_;
  std::erase_if(streams_, [&](const auto& known) {
    const auto found = wanted.find(known.first);
    return found == wanted.end() || found->second != known.second.group;
  });
  for (auto& [ranks, group] : wanted)
    if (!streams_.contains(ranks)) streams_.emplace(ranks, open(ranks, std::move(group)));
}

const JaxChannel::SetStream& JaxChannel::stream_for(const JaxCall& call) const {
  const auto found = streams_.find(call.ranks);
  if (found == streams_.end())
    throw invalid("the program was made for the process set " + call.ranks +
                      ", which is not registered, or this rank is not in it",
                  "call add_process_set() on every rank before the program runs");
  const SetStream& on = found->second;
  if (call.size != on.group->size())
    throw invalid("the program was made for " + std::to_string(call.size) + " ranks, and runs on " +
                      std::to_string(on.group->size()),
                  "call jax.clear_caches() after joining another world");
  return on;
}

std::shared_ptr<FusedCall> JaxChannel::launch(JaxCall call) {
  refuse_in_child();
  const std::lock_guard lock(launching_);
  const SetStream& on = stream_for(call);
  take_turn(call, *on.group);
  auto fused = std::make_shared<FusedCall>(on.group, std::move(call));
  fused->launch(on.stream);
  return fused;
}

void JaxChannel::take_turn(const JaxCall& call, Group& group) {
  const uint32_t due = next_.value_or(call.position);
  if (call.position == due) {
    next_ = due + 1;
    return;
  }
  Context where;
  where.rank = world_->rank();
  where.operation = name_of(call.options.kind);
  where.tensor = call.options.name;
  const Error error(ErrorCode::invalid_argument,
                    where.operation + " '" + where.tensor + "' on rank " +
                        std::to_string(where.rank) + " is out of order: it comes as call " +
                        std::to_string(call.position) + ", and " + std::to_string(due) + " is next",
                    where, "run programs with collectives from one Python thread");
  group.fail(error);
}

void JaxChannel::begin_anew() {
  {
    const std::lock_guard lock(launching_);
    next_.reset();
  }
  const std::lock_guard lock(error_mutex_);
  failing_ = false;
}

void JaxChannel::note(const Error& error) {
  const std::lock_guard lock(error_mutex_);
  last_error_ = error;
  failing_ = true;
}

std::optional<Error> JaxChannel::failure() const {
  const std::lock_guard lock(error_mutex_);
  return failing_ ? last_error_ : std::nullopt;
}

std::optional<Error> JaxChannel::last_error() const {
  const std::lock_guard lock(error_mutex_);
  return last_error_;
}

}  // namespace farandole
