// Streams, events, completion, kernels: what is in order, and what nobody waits for.
#include <poll.h>

#include <atomic>
#include <chrono>
#include <thread>
#include <vector>

#include "base/fd.h"
#include "cuda/driver/completion.h"
#include "cuda/driver/event.h"
#include "cuda/driver/memory.h"
#include "cuda/driver/module.h"
#include "cuda/driver/stream.h"
#include "fake.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;

namespace {

constexpr size_t kWords = 256;
constexpr char kImage[] = "fake image";

/// Calls that wait for the device, allocate or load: none of them belongs into a steady step.
constexpr const char* kNotInASteadyStep[] = {"cuStreamSynchronize",
                                             "cuEventSynchronize",
                                             "cuMemAlloc",
                                             "cuMemFree",
                                             "cuMemHostAlloc",
                                             "cuMemFreeHost",
                                             "cuMemHostRegister",
                                             "cuMemHostUnregister",
                                             "cuMemCreate",
                                             "cuMemMap",
                                             "cuMemUnmap",
                                             "cuModuleLoadDataEx",
                                             "cuModuleGetFunction",
                                             "cuFuncLoad",
                                             "cuStreamCreateWithPriority",
                                             "cuStreamDestroy",
                                             "cuEventCreate",
                                             "cuEventDestroy"};

/// The fake's streams stop for the length of a scope.
class Held {
 public:
  Held() { fake().hold(true); }
  ~Held() { fake().hold(false); }
  Held(const Held&) = delete;
  Held& operator=(const Held&) = delete;
};

uint32_t* words(const PinnedMemory& memory) { return reinterpret_cast<uint32_t*>(memory.host()); }
template <typename T>
T* as_pointer(DevicePointer address) {
  return reinterpret_cast<T*>(address);
}

bool rings_within(int event_fd, int milliseconds) {
  pollfd waited{event_fd, POLLIN, 0};
  return ::poll(&waited, 1, milliseconds) == 1;
}

}  // namespace

TEST(stream_does_its_work_in_order) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, 64, Sharing::none);
  const PinnedMemory result(context, 64);
  const DeviceStream stream(context);
  for (uint8_t i = 1; i <= 50; ++i) stream.fill(memory->address(), i, 64);
  stream.copy(result.address(), memory->address(), 64);
  stream.fill(memory->address(), 0, 64);
  stream.synchronize();
  CHECK(stream.idle());
  CHECK_EQUAL(words(result)[15], 50U * 0x01010101U);
}

TEST(stream_is_asked_without_waiting) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, 64, Sharing::none);
  const DeviceStream stream(context);
  {
    const Held held;
    stream.fill(memory->address(), 1, 64);
    CHECK(!stream.idle());
  }
  stream.synchronize();
  CHECK(stream.idle());
}

TEST(stream_has_the_highest_priority) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  fake().clear_log();
  {
    const DeviceStream stream(context);
  }
  CHECK_EQUAL(std::string(fake().log()),
              std::string("cuCtxPushCurrent\ncuCtxGetStreamPriorityRange\n"
                          "cuStreamCreateWithPriority\ncuCtxPopCurrent\n"
                          "cuCtxPushCurrent\ncuStreamSynchronize\ncuCtxPopCurrent\n"
                          "cuCtxPushCurrent\ncuStreamDestroy\ncuCtxPopCurrent\n"));
}

TEST(default_stream_of_a_framework_is_used) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, 64, Sharing::none);
  const PinnedMemory result(context, 64);
  const StreamRef theirs(context, nullptr);
  const DeviceStream ours(context);
  DeviceEvent ready(context);
  theirs.fill(memory->address(), 8, 64);
  ready.record(theirs);
  ours.wait(ready);
  ours.copy(result.address(), memory->address(), 64);
  ours.synchronize();
  CHECK_EQUAL(static_cast<int>(result.host()[63]), 8);
}

TEST(event_orders_streams) {
  const FreshDriver fresh;
  for (int seed = 1; seed <= 20; ++seed) {
    const testing::Note note("seed ", seed);
    fake().configure("jitter", std::to_string(seed).c_str());
    const auto context = fresh.context();
    const auto memory = allocate_device(context, 4096, Sharing::none);
    const PinnedMemory result(context, 4096);
    const DeviceStream producer(context), reducer(context);
    DeviceEvent ready(context), reduced(context);
    for (uint8_t step = 1; step <= 5; ++step) {
      producer.fill(memory->address(), step, 4096);
      ready.record(producer);
      reducer.wait(ready);
      reducer.copy(result.address(), memory->address(), 4096);
      reduced.record(reducer);
      producer.wait(reduced);  // before it writes the next step's
    }
    reduced.synchronize();
    CHECK_EQUAL(static_cast<int>(result.host()[4095]), 5);
    producer.synchronize();
  }
}

TEST(event_is_complete_once_the_stream_has_come_by) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceStream stream(context);
  DeviceEvent event(context);
  CHECK(event.complete());  // never recorded
  {
    const Held held;
    event.record(stream);
    CHECK(!event.complete());
  }
  event.synchronize();
  CHECK(event.complete());
}

TEST(events_measure_time) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceStream stream(context);
  DeviceEvent from(context, Timing::on), to(context, Timing::on), untimed(context);
  from.record(stream);
  stream.call([](void*) { std::this_thread::sleep_for(std::chrono::milliseconds(5)); }, nullptr);
  to.record(stream);
  untimed.record(stream);
  stream.synchronize();
  CHECK(to.milliseconds_since(from) >= 5);
  CHECK_THROWS(untimed.milliseconds_since(from), Error,
               contains(e.where().evidence, "cuEventElapsedTime came to"));
}

TEST(stream_waits_for_a_word) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const PinnedMemory word(context, sizeof(uint32_t)), result(context, 4);
  const DeviceStream stream(context);
  stream.wait(word.address(), 3);
  stream.fill(result.address(), 1, 4);
  std::atomic_ref(*words(word)).store(2, std::memory_order_release);
  CHECK(!stream.idle());
  std::atomic_ref(*words(word)).store(4, std::memory_order_release);  // it may be more
  stream.synchronize();
  CHECK_EQUAL(words(result)[0], 0x01010101U);
}

TEST(completion_is_seen_without_the_driver) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, 64, Sharing::none);
  CompletionCount done(context);
  const DeviceStream stream(context);
  const Fd doorbell = make_event_fd();
  uint32_t first = 0, second = 0;
  {
    const Held held;
    stream.fill(memory->address(), 1, 64);
    first = done.mark(stream, doorbell.get());
    second = done.mark(stream);
    CHECK(!done.reached(first) && !done.reached(second));
    CHECK(!rings_within(doorbell.get(), 0));
    fake().clear_log();
  }
  CHECK(rings_within(doorbell.get(), 10'000));
  CHECK(done.reached(first));  // the word comes before the bell
  while (!done.reached(second)) std::this_thread::yield();
  CHECK_EQUAL(std::string(fake().log()), std::string());
  stream.synchronize();
}

TEST(completion_needs_no_memory_operations) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  CompletionCount done(context);
  const DeviceStream stream(context);
  fake().fail("cuStreamWriteValue32", 1, kNotSupported);
  const uint32_t number = done.mark(stream);
  stream.synchronize();
  CHECK(done.reached(number));
  CHECK_EQUAL(fake().calls("cuMemsetD32Async"), 1U);
}

TEST(streams_that_cannot_wait_for_words_say_so) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const PinnedMemory word(context, sizeof(uint32_t));
  const DeviceStream stream(context);
  CHECK(stream.try_wait(word.address(), 0));
  fake().configure("memory_operations", "0");
  CHECK(!stream.try_wait(word.address(), 0));
  CHECK_THROWS(stream.wait(word.address(), 0), Error, e.code() == ErrorCode::device);
  fake().fail("cuStreamWaitValue32", 1, kInvalidValue);
  CHECK_THROWS(stream.try_wait(word.address(), 0), Error, e.code() == ErrorCode::internal);
}

TEST(completion_that_could_not_be_marked_is_not_counted) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  CompletionCount done(context);
  const DeviceStream stream(context);
  fake().fail("cuStreamWriteValue32", 1, kInvalidValue);
  CHECK_THROWS(done.mark(stream), Error, e.code() == ErrorCode::internal);
  CHECK_EQUAL(done.mark(stream), 1U);
  stream.synchronize();
  CHECK(done.reached(1));
}

TEST(kernels_are_launched_with_one_struct) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto module = DeviceModule::load(context, kImage);
  const DeviceFunction add = module->function("test_add");
  const PinnedMemory memory(context, kWords * sizeof(uint32_t));
  const DeviceStream stream(context);
  for (uint32_t i = 1; i <= 3; ++i)
    add.launch(stream, {2, 32}, TestAdd{as_pointer<uint32_t>(memory.address()), kWords, i});
  stream.synchronize();
  CHECK_EQUAL(words(memory)[0], 6U);
  CHECK_EQUAL(words(memory)[kWords - 1], 6U);
}

TEST(kernels_are_not_launched_with_another_struct) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceFunction add = DeviceModule::load(context, kImage)->function("test_add");
  const DeviceStream stream(context);
  CHECK_THROWS(add.launch(stream, {}, TestFail{}), Error,
               e.code() == ErrorCode::internal &&
                   e.verdict() == "the kernel test_add takes 24 bytes, not 4");
  CHECK_THROWS(add.launch(stream, {1, 2048}, TestAdd{}), Error,
               contains(e.verdict(), "in 1 blocks of 2048 threads, of which it has 1024 at most"));
  CHECK_THROWS(add.launch(stream, {0, 32}, TestAdd{}), Error, e.code() == ErrorCode::internal);
  CHECK_EQUAL(fake().calls("cuLaunchKernel"), 0U);
}

TEST(kernels_keep_their_module) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  auto module = DeviceModule::load(context, kImage);
  const DeviceFunction add = module->function("test_add");
  module.reset();
  const PinnedMemory memory(context, 4);
  const DeviceStream stream(context);
  add.launch(stream, {}, TestAdd{as_pointer<uint32_t>(memory.address()), 1, 5});
  stream.synchronize();
  CHECK_EQUAL(words(memory)[0], 5U);
}

TEST(kernels_are_loaded_into_a_context_once) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  auto module = DeviceModule::load(context, kImage);
  CHECK(DeviceModule::load(context, kImage) == module);
  CHECK_EQUAL(fake().calls("cuModuleLoadDataEx"), 1U);
  module.reset();
  CHECK_EQUAL(fake().calls("cuModuleUnload"), 1U);
  module = DeviceModule::load(context, kImage);
  CHECK_EQUAL(fake().calls("cuModuleLoadDataEx"), 2U);
}

TEST(images_that_are_no_kernels_are_refused) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  CHECK_THROWS(DeviceModule::load(context, "something"), Error,
               contains(e.verdict(),
                        "cannot load the kernels on device 0 (Fake GPU): the kernels "
                        "cannot be read by this driver"));
  CHECK_THROWS(DeviceModule::load(context, "bad image"), Error,
               contains(e.where().evidence, "; ptxas: line 7: no such instruction"));
  const auto module = DeviceModule::load(context, kImage);
  CHECK_THROWS(module->function("nobody"), Error,
               contains(e.verdict(), "cannot load the kernel nobody"));
}

TEST(kernel_that_fails_is_told_later) {
  const FreshDriver fresh;
  testing::Stderr said;
  const auto context = fresh.context();
  const DeviceFunction fail = DeviceModule::load(context, kImage)->function("test_fail");
  CompletionCount done(context);
  const DeviceStream stream(context);
  const Fd doorbell = make_event_fd();
  uint32_t number = 0;
  {
    const Held held;  // a kernel that has failed already is told by mark()
    fail.launch(stream, {}, TestFail{});
    number = done.mark(stream, doorbell.get());
  }
  CHECK_THROWS(stream.synchronize(), Error,
               contains(e.verdict(), "a kernel of this process failed"));
  CHECK(!done.reached(number) && !rings_within(doorbell.get(), 0));  // so somebody has to ask
  CHECK(context->lost());
}

TEST(waiting_kernel_ends_by_the_abort_word) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceFunction wait = DeviceModule::load(context, kImage)->function("test_wait");
  const PinnedMemory memory(context, 2 * sizeof(uint32_t));
  const DeviceStream stream(context);
  uint32_t* const word = as_pointer<uint32_t>(memory.address());
  wait.launch(stream, {}, TestWait{word, word + 1, 9});
  CHECK(!stream.idle());
  std::atomic_ref(words(memory)[1]).store(1, std::memory_order_release);
  stream.synchronize();
}

TEST(kernels_of_two_streams_meet) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto module = DeviceModule::load(context, kImage);
  const DeviceFunction wait = module->function("test_wait");
  const PinnedMemory memory(context, 3 * sizeof(uint32_t));
  uint32_t* const word = as_pointer<uint32_t>(memory.address());
  const DeviceStream a(context), b(context);
  wait.launch(a, {}, TestWait{word, word + 2, 1});
  a.write(memory.address() + 4, 1);
  b.write(memory.address(), 1);
  wait.launch(b, {}, TestWait{word + 1, word + 2, 1});
  a.synchronize();
  b.synchronize();
}

TEST(steady_step_neither_waits_nor_allocates) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kWords * 4, Sharing::processes);
  const DeviceFunction add = DeviceModule::load(context, kImage)->function("test_add");
  const StreamRef theirs(context, nullptr);
  CompletionCount done(context);
  const DeviceStream ours(context);
  DeviceEvent ready(context), reduced(context);
  const Fd doorbell = make_event_fd();
  theirs.fill(memory->address(), 0, kWords * 4);
  fake().clear_log();
  uint32_t last = 0;
  for (uint32_t step = 0; step < 5; ++step) {
    ready.record(theirs);
    ours.wait(ready);
    add.launch(ours, {1, 64}, TestAdd{as_pointer<uint32_t>(memory->address()), kWords, 1});
    reduced.record(ours);
    last = done.mark(ours, doorbell.get());
    theirs.wait(reduced);
  }
  for (const char* call : kNotInASteadyStep) {
    const testing::Note note(call);
    CHECK_EQUAL(fake().calls(call), 0U);
  }
  CHECK_EQUAL(fake().calls("cuLaunchKernel"), 5U);
  ours.synchronize();
  theirs.synchronize();
  CHECK(done.reached(last));
}

TEST(threads_use_streams_side_by_side) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceFunction add = DeviceModule::load(context, kImage)->function("test_add");
  std::vector<std::thread> threads;
  for (int t = 0; t < 4; ++t)
    threads.emplace_back([&] {
      const PinnedMemory memory(context, kWords * 4);
      CompletionCount done(context);
      const DeviceStream stream(context);
      for (int i = 0; i < 20; ++i) {
        add.launch(stream, {}, TestAdd{as_pointer<uint32_t>(memory.address()), kWords, 1});
        const uint32_t number = done.mark(stream);
        while (!done.reached(number)) std::this_thread::yield();
        CHECK_EQUAL(words(memory)[kWords - 1], static_cast<uint32_t>(i + 1));
      }
      stream.synchronize();
    });
  for (std::thread& thread : threads) thread.join();
}
