// Contexts: the primary one, pushed and popped, never left on a thread; devices; forks and exits.
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <thread>

#include "cuda/driver/memory.h"
#include "cuda/driver/stream.h"
#include "fake.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;

TEST(context_is_retained_and_released) {
  const FreshDriver fresh;
  {
    const auto first = fresh.context();
    const auto second = fresh.context();  // as a framework in this process
    CHECK_EQUAL(std::string(fake().alive()), std::string("1 context"));
  }
  CHECK_EQUAL(fake().calls("cuDevicePrimaryCtxRetain"), 2U);
  CHECK_EQUAL(fake().calls("cuDevicePrimaryCtxRelease"), 2U);
}

TEST(context_is_current_during_calls_alone) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  {
    DeviceStream stream(context);
    CHECK(fresh.current() == nullptr);
    stream.synchronize();
    CHECK(fresh.current() == nullptr);
    fake().fail("cuStreamSynchronize", 1, kInvalidValue);
    CHECK_THROWS(stream.synchronize(), Error, e.code() == ErrorCode::internal);
    CHECK(fresh.current() == nullptr);
  }
  CHECK(fresh.current() == nullptr);
}

TEST(context_of_the_user_is_current_afterwards) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const auto mine = fresh.context(0), of_user = fresh.context(1);
  const DeviceContext::Use user(*of_user);
  const ContextHandle before = fresh.current();
  {
    const DeviceStream stream(mine);
    CHECK(fresh.current() == before);
  }
  CHECK(fresh.current() == before);
}

TEST(context_is_entered_once_for_several_calls) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const auto mine = fresh.context(0), other = fresh.context(1);
  DeviceStream stream(mine), elsewhere(other);
  fake().clear_log();
  {
    const DeviceContext::Use all_calls(*mine);
    const ContextHandle entered = fresh.current();
    stream.synchronize();
    CHECK_EQUAL(fake().calls("cuCtxPushCurrent"), 1U);
    elsewhere.synchronize();
    CHECK(fresh.current() == entered);
    stream.synchronize();
    fake().fail("cuStreamSynchronize", 1, kInvalidValue);
    CHECK_THROWS(stream.synchronize(), Error, e.code() == ErrorCode::internal);
    CHECK(fresh.current() == entered);
  }
  CHECK(fresh.current() == nullptr);
  CHECK_EQUAL(fake().calls("cuCtxPushCurrent"), 2U);
  std::thread([&] {
    stream.synchronize();
    CHECK(fresh.current() == nullptr);
  }).join();
  CHECK_EQUAL(fake().calls("cuCtxPushCurrent"), 3U);
}

TEST(context_lives_for_as_long_as_what_is_in_it) {
  const FreshDriver fresh;
  auto context = fresh.context();
  auto memory = allocate_device(context, 100, Sharing::none);
  context.reset();
  CHECK(contains(fake().alive(), "1 context"));
  memory.reset();
  CHECK_EQUAL(std::string(fake().alive()), std::string());
}

TEST(context_of_an_old_device_is_refused) {
  const FreshDriver fresh;
  fake().configure("capability", "61");
  CHECK_THROWS(fresh.context(), Error,
               e.code() == ErrorCode::device &&
                   e.verdict() ==
                       "device 0 (Fake GPU) is too old: it has compute capability 6.1, "
                       "and the kernels need 7.0");
  CHECK_EQUAL(fake().calls("cuDevicePrimaryCtxRetain"), 0U);
}

TEST(context_of_a_device_that_another_process_has) {
  const FreshDriver fresh;
  fake().fail("cuDevicePrimaryCtxRetain", 1, 46);
  CHECK_THROWS(fresh.context(), Error,
               contains(e.verdict(), "cannot use device 0 (Fake GPU): another process has") &&
                   contains(e.advice(), "nvidia-smi -c DEFAULT"));
}

TEST(context_needs_a_device_that_is_there) {
  const FreshDriver fresh;
  for (const int ordinal : {-1, 1})
    CHECK_THROWS(fresh.context(ordinal), Error,
                 e.code() == ErrorCode::invalid_argument &&
                     e.verdict() ==
                         "there is no device " + std::to_string(ordinal) + ": this process sees 1");
}

TEST(device_is_described) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const auto driver = fresh.open();
  const auto all = all_devices(*driver);
  CHECK_EQUAL(all.size(), 2U);
  const DeviceProperties& device = all[1];
  CHECK_EQUAL(device.ordinal, 1);
  CHECK_EQUAL(device.label(), std::string("device 1 (Fake GPU)"));
  CHECK_EQUAL(device.uuid_text(), std::string("GPU-fafafafa-fafa-fafa-fafa-fafafafafa01"));
  CHECK_EQUAL(device.bus_id, std::string("0000:02:00.0"));
  CHECK_EQUAL(device.capability, 90);
  CHECK_EQUAL(device.memory_bytes, size_t{1} << 30);
  CHECK_EQUAL(device.multiprocessors, 4);
  CHECK(device.descriptors && device.registers_host_memory);
  CHECK(!device.instance && device.why_unfit().empty());
  CHECK(reaches(*driver, all[0], all[1]) && reaches(*driver, all[0], all[0]));
  fake().configure("peers", "0");
  CHECK(!reaches(*driver, all[0], all[1]) && reaches(*driver, all[0], all[0]));
}

TEST(device_may_be_an_instance) {
  const FreshDriver fresh;
  fake().configure("name", "NVIDIA H100 80GB HBM3 MIG 1g.10gb");
  const DeviceProperties device = device_properties(*fresh.open(), 0);
  CHECK(device.instance);
  CHECK(device.uuid_text().starts_with("MIG-fafafafa-"));
}

TEST(device_may_have_no_virtual_memory) {
  const FreshDriver fresh;
  fake().configure("virtual_memory", "0");
  CHECK(!device_properties(*fresh.open(), 0).descriptors);
}

TEST(device_fails_to_be_described) {
  const FreshDriver fresh;
  const auto driver = fresh.open();
  for (const char* call : {"cuDeviceGet", "cuDeviceGetName", "cuDeviceGetUuid", "cuDeviceTotalMem",
                           "cuDeviceGetAttribute", "cuDeviceGetPCIBusId"}) {
    const testing::Note note(call);
    fake().fail(call, 1, 999);
    CHECK_THROWS(device_properties(*driver, 0), Error,
                 e.code() == ErrorCode::device &&
                     e.verdict() == "cannot look at device 0: the driver does not say why" &&
                     e.where().evidence.starts_with(std::string(call) + " came to"));
  }
  fake().configure("devices", "2");
  const auto two = all_devices(*fresh.open());
  fake().fail("cuDeviceCanAccessPeer", 1, 999);
  CHECK_THROWS(reaches(*driver, two[0], two[1]), Error,
               contains(e.verdict(), "cannot ask whether device 0 (Fake GPU) reaches device 1"));
}

TEST(lost_context_says_its_first_error) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  DeviceStream stream(context);
  fake().fail("cuStreamQuery", 1, 700);
  CHECK_THROWS(stream.idle(), Error,
               e.code() == ErrorCode::device &&
                   e.verdict() ==
                       "cannot ask a stream whether it is done on device 0 (Fake GPU): a "
                       "kernel of this process used an address that is not its own" &&
                   contains(e.advice(), "compute-sanitizer"));
  CHECK(context->lost());
  const size_t pushes = fake().calls("cuCtxPushCurrent");
  CHECK_THROWS(
      stream.synchronize(), Error,
      e.code() == ErrorCode::device &&
          e.verdict() == "device 0 (Fake GPU) is lost to this process since an earlier error" &&
          contains(e.where().evidence, "an address that is not its own; cuStreamQuery") &&
          contains(e.where().evidence, "CUDA_ERROR_ILLEGAL_ADDRESS (700)"));
  CHECK_THROWS(allocate_device(context, 8, Sharing::none), Error, e.code() == ErrorCode::device);
  CHECK_EQUAL(fake().calls("cuCtxPushCurrent"), pushes);  // nobody asks the driver any more
}

TEST(context_that_somebody_reset_is_lost) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  DeviceStream stream(context);
  for (const int code : {201, 709}) CHECK(is_lasting(code));
  fake().fail("cuCtxPushCurrent", 1, 709);
  CHECK_THROWS(stream.idle(), Error,
               e.verdict() ==
                       "cannot enter the context on device 0 (Fake GPU): the device's "
                       "context is gone" &&
                   contains(e.advice(), "cudaDeviceReset"));
  CHECK(context->lost());
}

TEST(threads_lose_a_context_once) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const DeviceStream stream(context);
  fake().lose(719);
  std::vector<std::thread> threads;
  for (int i = 0; i < 4; ++i)
    threads.emplace_back([&] {
      CHECK_THROWS(stream.idle(), Error, e.code() == ErrorCode::device);
      CHECK(context->lost());
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(end_of_the_process_is_silent) {
  const FreshDriver fresh;
  testing::Stderr said;
  {
    const auto context = fresh.context();
    const DeviceStream stream(context);
    const auto memory = allocate_device(context, 100, Sharing::processes);
    fake().configure("deinitialized", "1");
    CHECK_THROWS(stream.idle(), Error, contains(e.verdict(), "as the process does"));
  }
  CHECK_EQUAL(said.text(), std::string());
  fake().configure("deinitialized", "0");
  fake().forget();
}

TEST(failure_to_clean_up_is_said) {
  const FreshDriver fresh;
  testing::Stderr said;
  fake().fail("cuStreamDestroy", 1, kInvalidValue);
  {
    const DeviceStream stream(fresh.context());
  }
  CHECK(contains(said.text(), "cannot clean up on device 0 (Fake GPU): the driver refuses"));
  CHECK(contains(said.text(), "cuStreamDestroy came to CUDA_ERROR_INVALID_VALUE (1)"));
  fake().forget();
}

TEST(forked_child_is_refused_and_quiet) {
  const FreshDriver fresh;
  const auto driver = fresh.open();
  auto context = DeviceContext::retain(driver, 0);
  auto memory = allocate_device(context, 100, Sharing::processes);
  auto stream = std::make_unique<DeviceStream>(context);
  const auto refused = [](const auto& act) {
    try {
      act();
      return false;
    } catch (const Error& error) {
      return error.code() == ErrorCode::forked && contains(error.verdict(), "was forked from one");
    }
  };
  // The stream's thread has begun, and rests: AddressSanitizer's allocator stays locked in a child
  // where another thread was in it.
  stream->fill_words(memory->address(), 0, 1);
  stream->synchronize();
  std::this_thread::sleep_for(std::chrono::milliseconds(100));
  const pid_t child = ::fork();
  if (child == 0) {
    bool good = refused([&] { driver->functions(); }) && refused([&] { stream->idle(); }) &&
                refused([&] { fresh.open(); }) && refused([&] { Driver::of_process(); }) &&
                refused([&] { DeviceContext::retain(driver, 0); }) &&
                refused([&] { allocate_device(context, 1, Sharing::none); }) &&
                refused([&] { memory->share(); });
    stream.reset();
    memory.reset();
    context.reset();
    good = good && std::string(fake().misuse()).empty();  // the driver was not called at all
    ::_exit(good ? 0 : 1);
  }
  int status = 0;
  ::waitpid(child, &status, 0);
  CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
  CHECK(stream->idle());  // the parent goes on
}
