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

}  // namespace farandole
