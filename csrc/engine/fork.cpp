#include "engine/fork.h"

#include <pthread.h>
#include <unistd.h>

#include <atomic>
#include <vector>

#include "base/error.h"
#include "engine/engine.h"

namespace farandole {
namespace {

// The process's engines, for the fork handlers alone.
std::vector<std::weak_ptr<Engine>>& engines() {
  static auto* list = new std::vector<std::weak_ptr<Engine>>;
  return *list;
}
std::atomic<bool> forked{false};

void in_forked_child() {
  for (const auto& weak : engines())
    if (const auto engine = weak.lock()) {
      forked.store(true, std::memory_order_relaxed);
      engine->close_descriptors();
      new std::shared_ptr<Engine>(engine);  // never destroyed here: its threads do not exist
    }
}

}  // namespace

void watch_for_forks() {
  static const int installed = ::pthread_atfork(nullptr, nullptr, in_forked_child);
  (void)installed;
}

void hide_from_children(const std::shared_ptr<Engine>& engine) {
  std::erase_if(engines(), [](const auto& weak) { return weak.expired(); });
  engines().push_back(engine);
}

bool in_child() { return forked.load(std::memory_order_relaxed); }

void refuse_in_child() {
  if (!in_child()) return;
  throw Error(ErrorCode::forked, "this process (pid " + std::to_string(::getpid()) +
                                     ") was forked from a rank; it cannot use the rank's engine");
}

}  // namespace farandole
