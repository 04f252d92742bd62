// The fake driver notices what is done wrong: else tests over it would show nothing.
#include <atomic>
#include <chrono>
#include <thread>

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

constexpr char kCopyOfFreed[] =
    "cuMemcpyAsync uses memory that was freed\n"
    "cuMemcpyAsync uses memory that the device does not know\n";
constexpr auto kTimeToGoWrong = std::chrono::milliseconds(20);  // in which a wrong fake goes on

}  // namespace

TEST(fake_notices_use_after_free) {
  FreshDriver fresh;
  fresh.expected_misuse = kCopyOfFreed;
  const auto context = fresh.context();
  const DeviceStream stream(context);
  const PinnedMemory target(context, 64);
  DevicePointer freed = 0;
  {
    freed = allocate_device(context, 64, Sharing::none)->address();
  }
  CHECK_THROWS(stream.copy(target.address(), freed, 64), Error, e.code() == ErrorCode::internal);
}

TEST(fake_notices_addresses_beyond_the_end) {
  FreshDriver fresh;
  fresh.expected_misuse =
      "cuMemsetD8Async uses addresses beyond the end of what was allocated\n"
      "cuMemsetD8Async uses memory that the device does not know\n";
  const auto context = fresh.context();
  const DeviceStream stream(context);
  const auto memory = allocate_device(context, 64, Sharing::none);
  CHECK_THROWS(stream.fill(memory->address(), 1, 65), Error, e.code() == ErrorCode::internal);
}

TEST(fake_notices_memory_of_the_host_that_is_not_pinned) {
  FreshDriver fresh;
  fresh.expected_misuse = "cuMemcpyAsync uses memory that the device does not know\n";
  const auto context = fresh.context();
  const DeviceStream stream(context);
  const auto memory = allocate_device(context, 64, Sharing::none);
  char pageable[64] = {};
  CHECK_THROWS(stream.copy(memory->address(), reinterpret_cast<DevicePointer>(pageable), 64), Error,
               e.code() == ErrorCode::internal);
}

TEST(fake_notices_memory_that_is_freed_while_it_is_used) {
  FreshDriver fresh;
  fresh.expected_misuse =
      "cuMemFree while a stream uses the memory\n"
      "cuMemUnmap while a stream uses the memory\n"
      "cuMemFreeHost while a stream uses the memory\n";
  const auto context = fresh.context();
  const DeviceFunction add = DeviceModule::load(context, "fake image")->function("test_add");
  const DeviceStream stream(context);
  auto plain = allocate_device(context, 64, Sharing::none);
  auto shared = allocate_device(context, 64, Sharing::processes);
  auto pinned = std::make_unique<PinnedMemory>(context, 64);
  fake().hold(true);
  for (const DeviceAddress* memory : {static_cast<const DeviceAddress*>(plain.get()),
                                      static_cast<const DeviceAddress*>(shared.get()),
                                      static_cast<const DeviceAddress*>(pinned.get())})
    add.launch(stream, {}, TestAdd{reinterpret_cast<uint32_t*>(memory->address()), 0, 1});
  plain.reset();
  shared.reset();
  pinned.reset();
  fake().hold(false);
  stream.synchronize();
}

TEST(fake_notices_kernels_that_get_what_was_freed) {
  FreshDriver fresh;
  fresh.expected_misuse = "test_add uses memory that was freed\n";
  const auto context = fresh.context();
  const DeviceFunction add = DeviceModule::load(context, "fake image")->function("test_add");
  const DeviceStream stream(context);
  DevicePointer freed = 0;
  {
    freed = allocate_device(context, 64, Sharing::none)->address();
  }
  add.launch(stream, {}, TestAdd{reinterpret_cast<uint32_t*>(freed), 0, 1});
  stream.synchronize();
}

TEST(fake_notices_streams_and_events_of_another_context) {
  FreshDriver fresh;
  fresh.expected_misuse =
      "cuStreamSynchronize of a stream of another context\n"
      "cuEventRecord of a stream of another context\n"
      "cuStreamQuery of a stream that is not there\n";
  fake().configure("devices", "2");
  const auto first = fresh.context(0), second = fresh.context(1);
  const DeviceStream stream(first);
  DeviceEvent event(second);
  CHECK_THROWS(StreamRef(second, stream.handle()).synchronize(), Error,
               contains(e.verdict(), "does not know the object"));
  CHECK_THROWS(event.record(StreamRef(first, stream.handle())), Error,
               contains(e.verdict(), "does not know the object"));
  StreamHandle gone = nullptr;
  {
    gone = DeviceStream(first).handle();
  }
  CHECK_THROWS(StreamRef(first, gone).idle(), Error, e.code() == ErrorCode::internal);
}

TEST(fake_notices_what_is_left) {
  FreshDriver fresh;
  fresh.expected_misuse = "a context ends with 1 stream, 1 event\n";
  const testing::Stderr said;
  auto context = fresh.context();
  fake().fail("cuStreamDestroy", 1, kInvalidValue);
  fake().fail("cuEventDestroy", 1, kInvalidValue);
  {
    const DeviceStream stream(context);
  }
  {
    const DeviceEvent event(context);
  }
  CHECK_EQUAL(std::string(fake().alive()), std::string("1 context, 1 stream, 1 event"));
}

TEST(fake_notices_host_functions_that_call_the_driver) {
  FreshDriver fresh;
  fresh.expected_misuse = "cuCtxPushCurrent is called by a host function\n";
  static std::shared_ptr<const DeviceContext> context;
  context = fresh.context();
  {
    static const DeviceStream* inside;
    const DeviceStream stream(context);
    inside = &stream;
    stream.call(
        [](void*) { CHECK_THROWS(inside->idle(), Error, contains(e.verdict(), "not permitted")); },
        nullptr);
    stream.synchronize();
  }
  context.reset();
}

TEST(fake_waits_for_the_record_that_was_the_last_at_the_call) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const PinnedMemory gate(context, sizeof(uint32_t));
  const DeviceStream busy(context), waiting(context), idle(context);
  DeviceEvent event(context);
  busy.wait(gate.address(), 1);
  event.record(busy);
  waiting.wait(event);
  event.record(idle);
  event.synchronize();  // asks for the last record
  CHECK(event.complete());
  std::this_thread::sleep_for(kTimeToGoWrong);
  CHECK(!waiting.idle());
  std::atomic_ref(*reinterpret_cast<uint32_t*>(gate.host())).store(1, std::memory_order_release);
  waiting.synchronize();
}

TEST(fake_loses_streams_with_work_in_them) {
  FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceStream stream(context);
  const auto memory = allocate_device(context, 64, Sharing::none);
  fake().hold(true);
  stream.fill(memory->address(), 1, 64);
  fake().lose(700);
  CHECK_THROWS(stream.synchronize(), Error, e.code() == ErrorCode::device);
  fake().hold(false);
}
