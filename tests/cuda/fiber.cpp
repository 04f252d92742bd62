#include "fiber.h"

#include <sys/mman.h>

#include <cstdint>
#include <cstdlib>
#include <new>
#include <vector>

// Calls that tell each sanitizer of a change of stacks; without one, no-ops. Under ThreadSanitizer
// this file and executor.cpp are compiled without it: their own state moves from fiber to fiber in
// one thread, and is no race.
#if defined(__has_feature)
#if __has_feature(address_sanitizer)
#define __SANITIZE_ADDRESS__ 1
#endif
#endif
#if defined(FARANDOLE_TELLS_THREAD_SANITIZER)
extern "C" {
void* __tsan_get_current_fiber(void);
void* __tsan_create_fiber(unsigned flags);
void __tsan_destroy_fiber(void* fiber);
void __tsan_switch_to_fiber(void* fiber, unsigned flags);
void __tsan_acquire(void* at);
void __tsan_release(void* at);
}
#else
static void* __tsan_get_current_fiber() { return nullptr; }
static void* __tsan_create_fiber(unsigned) { return nullptr; }
static void __tsan_destroy_fiber(void*) {}
static void __tsan_switch_to_fiber(void*, unsigned) {}
static void __tsan_acquire(void*) {}
static void __tsan_release(void*) {}
#endif
#if defined(__SANITIZE_ADDRESS__)
extern "C" {
void __sanitizer_start_switch_fiber(void** left, const void* bottom, size_t size);
void __sanitizer_finish_switch_fiber(void* entered, const void** bottom, size_t* size);
}
#else
static void __sanitizer_start_switch_fiber(void**, const void*, size_t) {}
static void __sanitizer_finish_switch_fiber(void*, const void**, size_t*) {}
#endif

// Saves what a call must keep, and goes on where the other stack was left.
#if defined(__x86_64__)
extern "C" void farandole_switch_stack(void** from, void* to);
asm(R"(
.text
.globl farandole_switch_stack
.type farandole_switch_stack, @function
farandole_switch_stack:
  pushq %rbp
  pushq %rbx
  pushq %r12
  pushq %r13
  pushq %r14
  pushq %r15
  movq %rsp, (%rdi)
  movq %rsi, %rsp
  popq %r15
  popq %r14
  popq %r13
  popq %r12
  popq %rbx
  popq %rbp
  ret
.size farandole_switch_stack, .-farandole_switch_stack
)");
#elif defined(__aarch64__)
extern "C" void farandole_switch_stack(void** from, void* to);
asm(R"(
.text
.globl farandole_switch_stack
.type farandole_switch_stack, %function
farandole_switch_stack:
  sub sp, sp, #160
  stp x19, x20, [sp]
  stp x21, x22, [sp, #16]
  stp x23, x24, [sp, #32]
  stp x25, x26, [sp, #48]
  stp x27, x28, [sp, #64]
  stp x29, x30, [sp, #80]
  stp d8, d9, [sp, #96]
  stp d10, d11, [sp, #112]
  stp d12, d13, [sp, #128]
  stp d14, d15, [sp, #144]
  mov x9, sp
  str x9, [x0]
  mov sp, x1
  ldp x19, x20, [sp]
  ldp x21, x22, [sp, #16]
  ldp x23, x24, [sp, #32]
  ldp x25, x26, [sp, #48]
  ldp x27, x28, [sp, #64]
  ldp x29, x30, [sp, #80]
  ldp d8, d9, [sp, #96]
  ldp d10, d11, [sp, #112]
  ldp d12, d13, [sp, #128]
  ldp d14, d15, [sp, #144]
  add sp, sp, #160
  ret
.size farandole_switch_stack, .-farandole_switch_stack
)");
#else
#error "the host executor changes stacks on x86-64 and Arm only"
#endif

namespace farandole::cuda {
namespace {

constexpr unsigned kInOrder = 0;
constexpr unsigned kNoOrder = 1;  // __tsan_switch_to_fiber_no_sync

#if defined(FARANDOLE_TELLS_THREAD_SANITIZER)
constexpr size_t kMostKept = 0;  // memory that comes back would be a race with who had it before
constexpr size_t kStackBytes = size_t{64} << 10;  // each is set up anew, four shadows wide
#else
constexpr size_t kMostKept = 4096;
constexpr size_t kStackBytes = size_t{256} << 10;  // touched as far as it is used
#endif

/// Stacks of ended fibers, for the next ones.
struct Stacks {
  std::vector<std::byte*> free;

  std::byte* take() {
    if (free.empty()) {
      void* made = mmap(nullptr, kStackBytes, PROT_READ | PROT_WRITE,
                        MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
      if (made == MAP_FAILED) throw std::bad_alloc();
      return static_cast<std::byte*>(made);
    }
    std::byte* last = free.back();
    free.pop_back();
    return last;
  }
  void give_back(std::byte* stack) {
    if (free.size() < kMostKept)
      free.push_back(stack);
    else
      munmap(stack, kStackBytes);
  }
  ~Stacks() {
    for (std::byte* stack : free) munmap(stack, kStackBytes);
  }
};
thread_local Stacks stacks;

thread_local Fiber* starting;  // what the first switch to a fiber finds

}  // namespace

void Fiber::begin() {
  Fiber& self = *starting;
  __sanitizer_finish_switch_fiber(nullptr, &self.thread_stack_, &self.thread_stack_bytes_);
  self.body_(self.argument_);
  std::abort();  // the body ends with finish()
}

Fiber::Fiber(void (*body)(void*), void* argument)
    : body_(body),
      argument_(argument),
      stack_(stacks.take()),
      sanitizer_inside_(__tsan_create_fiber(0)) {
  auto** top = reinterpret_cast<void**>(stack_ + kStackBytes);
#if defined(__x86_64__)
  top -= 2;
  *top = reinterpret_cast<void*>(begin);  // where the switch returns to, as if begin were called
  top -= 6;                               // the registers
#else
  top -= 20;
  top[11] = reinterpret_cast<void*>(begin);  // x30
#endif
  inside_ = top;
}

Fiber::~Fiber() {
  if (!finished_) {  // given up where it waits: what it did comes before what follows here
    void* const here = __tsan_get_current_fiber();
    __tsan_switch_to_fiber(sanitizer_inside_, kNoOrder);
    __tsan_switch_to_fiber(here, kInOrder);
  }
  stacks.give_back(stack_);
  __tsan_destroy_fiber(sanitizer_inside_);
}

void Fiber::resume() {
  starting = this;
  sanitizer_outside_ = __tsan_get_current_fiber();
  __tsan_switch_to_fiber(sanitizer_inside_, kNoOrder);
  void* frames = nullptr;
  __sanitizer_start_switch_fiber(&frames, stack_, kStackBytes);
  farandole_switch_stack(&outside_, inside_);
  __sanitizer_finish_switch_fiber(frames, nullptr, nullptr);
}

void Fiber::leave(void** frames) {
  __tsan_switch_to_fiber(sanitizer_outside_, kNoOrder);
  __sanitizer_start_switch_fiber(frames, thread_stack_, thread_stack_bytes_);
  farandole_switch_stack(&inside_, outside_);
}

void Fiber::suspend() {
  void* frames = nullptr;
  leave(&frames);
  __sanitizer_finish_switch_fiber(frames, &thread_stack_, &thread_stack_bytes_);
}

void Fiber::finish() {
  finished_ = true;
  leave(nullptr);  // its frames are given up
  std::abort();
}

void release(void* at) { __tsan_release(at); }
void acquire(void* at) { __tsan_acquire(at); }

}  // namespace farandole::cuda
