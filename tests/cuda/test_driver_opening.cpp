// Opening the driver: what a machine may lack is one sentence each.
#include <cstdlib>

#include "cuda/driver/driver.h"
#include "cuda/exchange/kernel_image.h"
#include "fake.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;

namespace {

/// An environment variable for the length of a scope.
class Variable {
 public:
  Variable(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Variable() { ::unsetenv(name_); }
  Variable(const Variable&) = delete;
  Variable& operator=(const Variable&) = delete;

 private:
  const char* name_;
};

/// Opening fails as a device's error with this verdict, and with some advice.
void check_refusal(const FreshDriver& driver, const std::string& verdict) {
  CHECK_THROWS(driver.open(), Error,
               e.code() == ErrorCode::device && e.verdict() == verdict && !e.advice().empty());
}

}  // namespace

TEST(driver_opens) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const auto driver = fresh.open();
  CHECK_EQUAL(driver->version(), 99000);
  CHECK_EQUAL(driver->device_count(), 2);
}

TEST(driver_is_not_there) {
  CHECK_THROWS(
      Driver::open("libcuda-of-nobody.so.1"), Error,
      e.code() == ErrorCode::device &&
          e.verdict() == "there is no CUDA driver: libcuda-of-nobody.so.1 cannot be opened" &&
          contains(e.where().evidence, "No such file"));
}

TEST(driver_is_something_else) {
  CHECK_THROWS(Driver::open("libm.so.6"), Error,
               contains(e.verdict(), "it has no cuInit, which drivers have from CUDA 2.0 on; it "));
}

namespace {

std::string why(int nvcc, int driver, int capability) {
  static constexpr int kCodes[] = {75, 80, 90};
  DeviceProperties device;
  device.ordinal = 0;
  device.name = "GPU";
  device.capability = capability;
  return why_not_loaded({nvcc, kCodes}, driver, device);
}

}  // namespace

TEST(driver_is_too_old_for_what_was_compiled) {
  CHECK_EQUAL(why(0, 12000, 90), "");
  CHECK_EQUAL(why(13000, 13000, 90), "");
  CHECK_EQUAL(why(12080, 13000, 103), "");
  for (const int capability : {75, 80, 86, 89, 90}) CHECK_EQUAL(why(12080, 12000, capability), "");
  for (const int capability : {100, 120})
    CHECK_EQUAL(why(12080, 12020, capability),
                "the CUDA driver is too old: it is of CUDA 12.2, and takes no PTX by CUDA 12.8, "
                "which is all that the kernels have for device 0 (GPU)");
  CHECK_EQUAL(why(13010, 12080, 90),
              "the CUDA driver is too old: it is of CUDA 12.8, and the kernels, compiled by CUDA "
              "13.1, need 13.0");
}

TEST(device_is_older_than_all_that_was_compiled_for) {
  for (const int driver : {12000, 13000, 14000})
    CHECK_EQUAL(why(13000, driver, 72),
                "device 0 (GPU) has compute capability 7.2, for which this build has no kernels: "
                "CUDA 13.0 has made code for 7.5, 8.0, 9.0 and PTX for 7.5 and later");
  CHECK_EQUAL(why(0, 13000, 72), "");
}

TEST(driver_is_too_old) {
  const FreshDriver fresh;
  fake().configure("version", "11040");
  check_refusal(fresh, "the CUDA driver is too old: it is of CUDA 11.4, and the kernels need 12.0");
  CHECK_EQUAL(fake().calls("cuInit"), 0U);
}

TEST(driver_sees_no_device) {
  const FreshDriver fresh;
  fake().configure("devices", "0");
  check_refusal(fresh, "the CUDA driver finds no device");
}

TEST(driver_is_told_to_show_no_device) {
  const FreshDriver fresh;
  for (const char* hidden : {"", "-1"}) {
    const Variable visible("CUDA_VISIBLE_DEVICES", hidden);
    check_refusal(fresh, "CUDA_VISIBLE_DEVICES is '" + std::string(hidden) +
                             "': it hides all devices from this process");
  }
  const Variable visible("CUDA_VISIBLE_DEVICES", "7");
  check_refusal(fresh, "CUDA_VISIBLE_DEVICES is '7', and the driver finds no such device");
}

TEST(driver_is_told_of_an_instance_that_is_not_there) {
  const FreshDriver fresh;
  const Variable visible("CUDA_VISIBLE_DEVICES", "MIG-1234");
  check_refusal(fresh,
                "CUDA_VISIBLE_DEVICES is 'MIG-1234', and the driver finds no such MIG instance");
}

TEST(driver_shows_some_of_the_devices) {
  const FreshDriver fresh;
  fake().configure("devices", "4");
  const Variable visible("CUDA_VISIBLE_DEVICES", "3,1");
  const auto driver = fresh.open();
  CHECK_EQUAL(driver->device_count(), 2);
  CHECK_EQUAL(device_properties(*driver, 0).uuid_text(),
              std::string("GPU-fafafafa-fafa-fafa-fafa-fafafafafa03"));
}

TEST(driver_fails_to_initialize_in_many_ways) {
  for (const StatusRow& row : status_rows()) {
    if (row.code == kNoDevice || row.code == kInvalidDevice) continue;  // above
    const testing::Note note(row.name);
    const FreshDriver fresh;
    fake().fail("cuInit", 1, row.code);
    CHECK_THROWS(
        fresh.open(), Error,
        e.code() == row.kind && e.verdict() == "cannot use CUDA: " + std::string(row.meaning) &&
            e.advice() == row.advice &&
            contains(e.where().evidence, "cuInit came to CUDA_ERROR_" + std::string(row.name) +
                                             " (" + std::to_string(row.code) + "), "));
    CHECK_EQUAL(fresh.open()->device_count(), 1);  // a failure is not kept
  }
}

TEST(driver_fails_to_count_devices) {
  const FreshDriver fresh;
  fake().fail("cuDeviceGetCount", 1, 802);
  CHECK_THROWS(fresh.open(), Error, contains(e.advice(), "nvidia-fabricmanager"));
}

TEST(driver_has_an_error_that_nobody_knows) {
  const FreshDriver fresh;
  fake().fail("cuInit", 1, 12345);
  CHECK_THROWS(fresh.open(), Error,
               e.code() == ErrorCode::device &&
                   contains(e.where().evidence, "cuInit came to an error (12345), "));
}

TEST(each_function_may_be_missing) {
  const FreshDriver fresh;
  const DriverLibrary library(testing::fake_driver());
  const auto bind_without = [&](const std::string& missing) {
    return bind_functions([&](const char* name, const char* symbol, int since) {
      return name == missing ? nullptr : library.find(name, symbol, since);
    });
  };
#define X(name, suffix, since, arguments)                                                        \
  CHECK_THROWS(                                                                                  \
      bind_without("cu" #name), Error,                                                           \
      e.code() == ErrorCode::device &&                                                           \
          e.verdict() == "the CUDA driver's library is not complete: it has no cu" #name #suffix \
                         ", which drivers have from CUDA " +                                     \
                             version_text(since) + " on");
  FARANDOLE_CUDA_FUNCTIONS(X)
#undef X
#define X(name, suffix, since, arguments) CHECK(bind_without("cu" #name).name == nullptr);
  FARANDOLE_CUDA_OPTIONAL_FUNCTIONS(X)
#undef X
  CHECK(bind_without("").have_virtual_memory());
  CHECK(!bind_without("cuMemMap").have_virtual_memory());
}

TEST(functions_are_found_by_the_driver_and_by_their_symbols) {
  const FreshDriver fresh;
  const DriverLibrary library(testing::fake_driver());
  void* const by_driver = library.find("cuMemAlloc", "no_such_symbol", 3020);
  CHECK(by_driver != nullptr);
  fake().configure("lacks", "cuMemAlloc");
  CHECK(library.find("cuMemAlloc", "no_such_symbol", 3020) == nullptr);
  CHECK(library.find("cuMemAlloc", "cuMemAlloc_v2", 3020) == by_driver);
}

TEST(statuses_are_in_order_and_whole) {
  DriverCode before = 0;
  for (const StatusRow& row : status_rows()) {
    CHECK(row.code > before);
    before = row.code;
    CHECK(!row.name.empty() && !row.meaning.empty() && !row.advice.empty());
    CHECK(find_status(row.code) == &row);
  }
  CHECK(find_status(12345) == nullptr);
  CHECK(is_lasting(700) && !is_lasting(kOutOfMemory));
}
