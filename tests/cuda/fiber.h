// A stack of its own and a way there and back. ThreadSanitizer takes fibers for threads, which
// nothing orders but what says so.
#pragma once

#include <cstddef>

namespace farandole::cuda {

class Fiber {
 public:
  /// `body` runs at the first resume() and ends with finish().
  Fiber(void (*body)(void*), void* argument);
  ~Fiber();
  Fiber(const Fiber&) = delete;
  Fiber& operator=(const Fiber&) = delete;

  void resume();               // from the thread, until the fiber suspends or ends
  void suspend();              // from the fiber
  [[noreturn]] void finish();  // from the fiber: it is not resumed again

 private:
  [[noreturn]] static void begin();
  void leave(void** frames);

  void (*body_)(void*);
  void* argument_;
  std::byte* stack_;
  bool finished_ = false;
  const void* thread_stack_ = nullptr;  // for AddressSanitizer
  std::size_t thread_stack_bytes_ = 0;
  void* inside_ = nullptr;  // saved stack pointers
  void* outside_ = nullptr;
  void* sanitizer_inside_ = nullptr;
  void* sanitizer_outside_ = nullptr;
};

/// For ThreadSanitizer: what happened before release(at) happens before what follows acquire(at).
void release(void* at);
void acquire(void* at);

}  // namespace farandole::cuda
