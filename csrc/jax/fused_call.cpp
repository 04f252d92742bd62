#include "jax/fused_call.h"

namespace farandole {
namespace {

constexpr PackLimits kLimits{
    .together = 4 << 20,  // the pack before is reduced while the next one is filled
    .alone = 128 << 10,   // as operations by name have it
};
// How often the launching thread looks by itself: most of what is small ends within a few
// microseconds, and waking another thread costs more than that.
constexpr int kLooks = 200;
constexpr size_t kQuickBytes = 16 << 10;

}  // namespace

FusedCall::FusedCall(std::shared_ptr<Group> group, JaxCall call)
    : group_(std::move(group)),
      operations_(*group_, std::move(call.operands), std::move(call.options), kLimits) {}

void FusedCall::launch(const std::shared_ptr<Stream>& stream) {
  const bool quick = operations_.operations() == 1 && operations_.bytes() <= kQuickBytes;
  try {
    operations_.begin_on(stream, quick ? kLooks : 0);
  } catch (const Error& error) {  // what is under way already ends first
    group_->abort(error);         // nobody waits for what this rank will not send
    error_ = error;
  }
}

std::optional<Error> FusedCall::finish() {
  try {
    operations_.wait();
  } catch (const Error& error) {
    if (!error_) error_ = error;
  }
  return error_;
}

}  // namespace farandole
