#include "base/quiet_thread.h"

#include <pthread.h>
#include <signal.h>

#include <system_error>
#include <utility>

#include "base/error.h"

namespace farandole {
namespace {

/// A new thread inherits what its parent blocks.
class AllSignalsBlocked {
 public:
  AllSignalsBlocked() {
    sigset_t all;
    ::sigfillset(&all);
    ::pthread_sigmask(SIG_SETMASK, &all, &before_);
  }
  ~AllSignalsBlocked() { ::pthread_sigmask(SIG_SETMASK, &before_, nullptr); }
  AllSignalsBlocked(const AllSignalsBlocked&) = delete;
  AllSignalsBlocked& operator=(const AllSignalsBlocked&) = delete;

 private:
  sigset_t before_;
};

}  // namespace

std::thread start_quiet_thread(const std::string& name, std::function<void()> body) {
  const AllSignalsBlocked blocked;
  try {
    return std::thread([name, body = std::move(body)] {
      ::pthread_setname_np(::pthread_self(), name.c_str());
      body();
    });
  } catch (const std::system_error& error) {
    throw Error(ErrorCode::resource, "starting the thread " + name + " failed: " + error.what());
  }
}

}  // namespace farandole
