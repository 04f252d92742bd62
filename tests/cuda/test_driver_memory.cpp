// Memory: what is allocated is freed in every case, and mapped once however often it is asked for.
#include "cuda/driver/memory.h"

#include <fcntl.h>

#include <cstring>
#include <vector>

#include "cuda/driver/peer_memory.h"
#include "cuda/driver/stream.h"
#include "fake.h"
#include "host_pages.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;
using testing::HostPages;

namespace {

constexpr size_t kAllocated = 1000;

/// As it comes from another process.
MemoryExport of_another_process(MemoryExport shared, uint64_t process = 1) {
  shared.id.process = process;
  return shared;
}

/// The contents of a device's memory.
std::vector<std::byte> read(const DeviceAddress& memory, size_t bytes) {
  const auto context = std::shared_ptr<const DeviceContext>(&memory.context(), [](const auto*) {});
  const PinnedMemory staging(context, bytes);
  const DeviceStream stream(context);
  stream.copy(staging.address(), memory.address(), bytes);
  stream.synchronize();
  return {staging.host(), staging.host() + bytes};
}

void fill(const DeviceAddress& memory, uint8_t value) {
  const auto context = std::shared_ptr<const DeviceContext>(&memory.context(), [](const auto*) {});
  const DeviceStream stream(context);
  stream.fill(memory.address(), value, kAllocated);
  stream.synchronize();
}

}  // namespace

TEST(memory_is_allocated_and_freed) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  for (const Sharing sharing : {Sharing::none, Sharing::processes}) {
    const auto memory = allocate_device(context, kAllocated, sharing);
    CHECK(memory->bytes() >= kAllocated);
    fill(*memory, 7);
    CHECK_EQUAL(static_cast<int>(read(*memory, kAllocated)[kAllocated - 1]), 7);
  }
}

TEST(memory_for_processes_is_virtual_where_that_is_there) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kAllocated, Sharing::processes);
  CHECK_EQUAL(memory->bytes(), size_t{2} << 20);
  CHECK_EQUAL(fake().calls("cuMemAlloc"), 0U);
  const MemoryExport shared = memory->share();
  CHECK(shared.kind == ExportKind::descriptor && shared.bytes == memory->bytes());
  CHECK(shared.id == memory->id() && shared.id.process == own_process());
  CHECK(shared.device == context->device().uuid);
  CHECK((::fcntl(shared.descriptor.get(), F_GETFD) & FD_CLOEXEC) != 0);
}

TEST(memory_for_processes_is_of_whole_blocks_elsewhere) {
  const FreshDriver fresh;
  fake().configure("virtual_memory", "0");
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kAllocated, Sharing::processes);
  CHECK_EQUAL(memory->bytes(), size_t{2} << 20);
  CHECK(memory->share().kind == ExportKind::ipc);
  CHECK_EQUAL(fake().calls("cuMemCreate"), 0U);
}

TEST(memory_that_is_not_for_processes_is_not_shared) {
  const FreshDriver fresh;
  const auto memory = allocate_device(fresh.context(), kAllocated, Sharing::none);
  CHECK_THROWS(memory->share(), Error, e.code() == ErrorCode::internal);
}

TEST(memory_is_exhausted) {
  const FreshDriver fresh;
  fake().configure("memory", "8388608");
  const auto context = fresh.context();
  const auto half = allocate_device(context, 4 << 20, Sharing::processes);
  for (const Sharing sharing : {Sharing::none, Sharing::processes})
    CHECK_THROWS(
        allocate_device(context, 6 << 20, sharing), Error,
        e.code() == ErrorCode::resource && contains(e.verdict(), "cannot allocate 6291456 bytes") &&
            contains(e.verdict(), "on device 0 (Fake GPU): memory is exhausted") &&
            contains(e.where().evidence, "; of 8388608 bytes of the device, 4194304 are free") &&
            contains(e.advice(), "smaller buckets"));
  CHECK(!context->lost());
  CHECK(allocate_device(context, 2 << 20, Sharing::processes)->address() != 0);
}

TEST(ids_of_memory_differ) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto a = allocate_device(context, kAllocated, Sharing::none),
             b = allocate_device(context, kAllocated, Sharing::none);
  CHECK(a->id() != b->id() && a->id().process == b->id().process);
}

TEST(peer_memory_is_the_same_memory) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kAllocated, Sharing::processes);
  PeerMappings peers(context);
  const auto mapped = peers.map(of_another_process(memory->share()));
  CHECK(mapped->address() != memory->address());
  fill(*memory, 3);
  CHECK_EQUAL(static_cast<int>(read(*mapped, kAllocated)[0]), 3);
}

TEST(peer_memory_is_mapped_once) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kAllocated, Sharing::processes);
  PeerMappings peers(context);
  auto first = peers.map(of_another_process(memory->share()));
  auto second = peers.map(of_another_process(memory->share()));
  CHECK(first == second);
  CHECK(peers.map(of_another_process(memory->share(), 2)) != first);  // another process's number
  CHECK_EQUAL(fake().calls("cuMemImportFromShareableHandle"), 2U);
  first.reset();
  CHECK_EQUAL(std::string(fake().alive()), std::string("1 context, 2 mappings, 2 physical "
                                                       "allocations, 2 reservations"));
  second.reset();
  CHECK(peers.map(of_another_process(memory->share()))->address() != 0);  // mapped anew
  CHECK_EQUAL(fake().calls("cuMemImportFromShareableHandle"), 3U);
}

TEST(peer_memory_outlives_its_owner_where_memory_is_virtual) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  auto memory = allocate_device(context, kAllocated, Sharing::processes);
  PeerMappings peers(context);
  const auto mapped = peers.map(of_another_process(memory->share()));
  fill(*memory, 9);
  memory.reset();
  CHECK_EQUAL(static_cast<int>(read(*mapped, kAllocated)[kAllocated / 2]), 9);
}

TEST(own_memory_is_no_peers) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kAllocated, Sharing::processes);
  PeerMappings peers(context);
  CHECK_THROWS(peers.map(memory->share()), Error, e.code() == ErrorCode::internal);
}

TEST(peer_memory_by_descriptor_needs_virtual_memory) {
  const FreshDriver fresh;
  fake().configure("virtual_memory", "0");
  const auto context = fresh.context();
  PeerMappings peers(context);
  MemoryExport shared;
  shared.device = context->device().uuid;
  shared.bytes = 2 << 20;
  CHECK_THROWS(peers.map(shared), Error,
               e.code() == ErrorCode::device &&
                   e.verdict() == "device 0 (Fake GPU) cannot map memory by its descriptor");
}

TEST(peer_memory_by_a_wrong_descriptor_is_refused) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  PeerMappings peers(context);
  MemoryExport shared;
  shared.device = context->device().uuid;
  shared.bytes = 2 << 20;
  shared.descriptor = Fd(::open("/dev/null", O_RDWR | O_CLOEXEC));
  CHECK_THROWS(peers.map(shared), Error,
               e.where().evidence.starts_with("cuMemImportFromShareableHandle came to"));
}

TEST(peer_memory_is_of_a_device_in_reach) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const auto here = fresh.context(0), there = fresh.context(1);
  const auto memory = allocate_device(there, kAllocated, Sharing::processes);
  PeerMappings peers(here);
  CHECK(peers.map(of_another_process(memory->share()))->address() != 0);
  fake().configure("peers", "0");
  CHECK_THROWS(peers.map(of_another_process(memory->share())), Error,
               e.code() == ErrorCode::device &&
                   e.verdict() ==
                       "device 0 (Fake GPU) cannot reach the memory of device 1 (Fake "
                       "GPU)");
}

TEST(peer_memory_is_of_a_device_that_this_process_does_not_see) {
  for (const char* virtual_memory : {"1", "0"}) {
    const FreshDriver fresh;
    fake().configure("devices", "2");
    fake().configure("virtual_memory", virtual_memory);
    const auto here = fresh.context(0), there = fresh.context(1);
    const auto memory = allocate_device(there, kAllocated, Sharing::processes);
    PeerMappings peers(here);
    MemoryExport hidden = of_another_process(memory->share());
    hidden.device.bytes[0] = 0;
    if (hidden.kind == ExportKind::descriptor) CHECK(peers.map(hidden)->address() != 0);
    fake().configure("peers", "0");
    if (hidden.kind == ExportKind::ipc) fake().fail("cuIpcOpenMemHandle", 1, 217);
    CHECK_THROWS(peers.map(hidden), Error,
                 e.code() == ErrorCode::device &&
                     e.verdict().starts_with(
                         "this process does not see GPU-00fafafa-fafa-fafa-fafa-fafafafafa01, "
                         "whose memory a peer shares, and cannot map it: cannot ") &&
                     contains(e.advice(), "CUDA_VISIBLE_DEVICES"));
  }
}

TEST(pinned_memory_is_zero_and_of_both) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const PinnedMemory pinned(context, kAllocated);
  for (size_t i = 0; i < kAllocated; ++i) CHECK(pinned.host()[i] == std::byte{0});
  fill(pinned, 5);
  CHECK_EQUAL(static_cast<int>(pinned.host()[kAllocated - 1]), 5);
}

TEST(pages_of_a_segment_are_registered) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const HostPages pages(3 * 4096);
  {
    const RegisteredPages registered(context, pages.all().subspan(4096, 8192));
    CHECK_EQUAL(registered.bytes(), 8192U);
    fill(registered, 4);
  }
  CHECK(pages.all()[4096] == std::byte{4} && pages.all()[4095] == std::byte{0});
  const RegisteredPages again(context, pages.all());  // the pages are free again
  CHECK_THROWS(RegisteredPages(context, pages.all().first(4096)), Error,
               contains(e.verdict(), "the host's memory is registered already"));
}

TEST(pages_are_registered_once_for_several_devices) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const HostPages pages(4096);
  auto first = std::make_unique<RegisteredPages>(fresh.context(0), pages.all());
  {
    const RegisteredPages second(fresh.context(1), pages.all());
    CHECK_EQUAL(fake().calls("cuMemHostRegister"), size_t{1});
    first.reset();
    fill(second, 6);
    CHECK_EQUAL(fake().calls("cuMemHostUnregister"), size_t{0});
  }
  CHECK(pages.all()[kAllocated - 1] == std::byte{6});
  CHECK_EQUAL(fake().calls("cuMemHostUnregister"), size_t{1});
  fake().fail("cuMemHostGetDevicePointer", 1, kOutOfMemory);
  CHECK_THROWS(RegisteredPages(fresh.context(1), pages.all()), Error,
               e.code() == ErrorCode::resource);
  const RegisteredPages again(fresh.context(0), pages.all());  // the pages are free again
}

TEST(parts_of_pages_are_not_registered) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const HostPages pages(2 * 4096);
  CHECK_THROWS(RegisteredPages(context, pages.all().subspan(8)), Error,
               e.code() == ErrorCode::internal);
  CHECK_THROWS(RegisteredPages(context, pages.all().first(100)), Error,
               e.code() == ErrorCode::internal);
  CHECK_THROWS(RegisteredPages(context, {}), Error, e.code() == ErrorCode::internal);
}

TEST(pages_cannot_be_registered_on_every_device) {
  const FreshDriver fresh;
  fake().configure("host_register", "0");
  const auto context = fresh.context();
  const HostPages pages(4096);
  CHECK_THROWS(
      RegisteredPages(context, pages.all()), Error,
      e.code() == ErrorCode::device &&
          e.verdict() == "device 0 (Fake GPU) cannot use memory that others have allocated");
}
