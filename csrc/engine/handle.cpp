#include "engine/handle.h"

#include "engine/engine.h"
#include "engine/fork.h"

namespace farandole {

bool Handle::wait(Deadline until) const {
  if (!request_) return true;
  refuse_in_child();
  if (!request_->finished.load(std::memory_order_acquire) &&
      !engine_->driver().wait(*request_, until))
    return false;
  if (request_->error) throw Error(*request_->error);
  return true;
}

bool wait_for_all(std::span<const Handle> handles, Deadline until, std::optional<Error>& first) {
  for (const Handle& handle : handles) {
    try {
      if (!handle.wait(until)) return false;
    } catch (const Error& error) {
      if (!first) first = error;
    }
  }
  return true;
}

}  // namespace farandole
