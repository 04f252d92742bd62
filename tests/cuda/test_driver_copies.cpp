// The staged way's two streams: copies in order with the stream of an array's owner on both ends,
// in no order with each other, and marks that tell of them.
#include <poll.h>

#include <cstring>
#include <span>

#include "cuda/driver/copy_streams.h"
#include "cuda/driver/memory.h"
#include "fake.h"
#include "host_pages.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;
using testing::HostPages;

namespace {

constexpr size_t kBytes = 4096;

bool has_rung(const Fd& doorbell) {
  pollfd waited{doorbell.get(), POLLIN, 0};
  return ::poll(&waited, 1, 0) == 1;
}

uint8_t last_of(const std::shared_ptr<const DeviceContext>& context, const DeviceMemory& memory,
                const StreamRef& stream) {
  const PinnedMemory seen(context, kBytes);
  stream.copy(seen.address(), memory.address(), kBytes);
  stream.synchronize();
  return static_cast<uint8_t>(seen.host()[kBytes - 1]);
}

}  // namespace

TEST(copies_wait_for_the_owner_and_the_owner_for_copies) {
  for (const char* seed : {"0", "1", "2", "3"}) {
    const FreshDriver fresh;
    fake().configure("jitter", seed);
    const auto context = fresh.context();
    const auto memory = allocate_device(context, kBytes, Sharing::none);
    const HostPages pages(kBytes);
    const RegisteredPages registered(context, pages.all());
    const Fd doorbell = make_event_fd();
    const DeviceStream owner(context);
    CopyStreams copies(context, doorbell.get());

    owner.fill(memory->address(), 7, kBytes);
    copies.follow(owner.handle());
    copies.stream(kToHost).copy(registered.address(), memory->address(), kBytes);
    const uint32_t arrived = copies.mark(kToHost);
    copies.stream(kToHost).synchronize();
    CHECK(copies.reached(kToHost, arrived));
    CHECK(has_rung(doorbell));
    CHECK_EQUAL(int(static_cast<uint8_t>(pages.all().back())), 7);

    std::memset(pages.all().data(), 9, kBytes);
    copies.stream(kToDevice).copy(memory->address(), registered.address(), kBytes);
    const uint32_t left = copies.mark(kToDevice);
    copies.precede(owner.handle());
    CHECK_EQUAL(int(last_of(context, *memory, owner)), 9);
    CHECK(copies.reached(kToDevice, left));
  }
}

TEST(copies_one_way_do_not_wait_for_the_other) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  const auto memory = allocate_device(context, kBytes, Sharing::none);
  const HostPages pages(kBytes);
  const RegisteredPages registered(context, pages.all());
  const PinnedMemory go(context, 4);
  const DeviceStream owner(context);
  CopyStreams copies(context, -1);

  owner.wait(go.address(), 1);  // an owner that is not ready
  copies.follow(owner.handle());
  const uint32_t arrived = copies.mark(kToHost);
  copies.stream(kToDevice).copy(memory->address(), registered.address(), kBytes);
  const uint32_t left = copies.mark(kToDevice);
  copies.stream(kToDevice).synchronize();
  CHECK(copies.reached(kToDevice, left));
  CHECK(!copies.reached(kToHost, arrived));
  std::atomic_ref(*reinterpret_cast<uint32_t*>(go.host())).store(1);
  copies.stream(kToHost).synchronize();
  CHECK(copies.reached(kToHost, arrived));
}

TEST(copies_are_no_part_of_a_graph) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  CopyStreams copies(context, -1);
  const DeviceStream owner(context);
  testing::Capture capture(context, owner);
  for (const bool follows : {true, false})
    CHECK_THROWS(follows ? copies.follow(owner.handle()) : copies.precede(owner.handle()), Error,
                 e.code() == ErrorCode::invalid_argument && contains(e.what(), "CUDA graph"));
  CHECK_EQUAL(fake().calls("cuEventRecord"), 0U);
  capture.end();
  copies.follow(owner.handle());
}

TEST(copies_of_a_lost_device_are_never_reached_and_whoever_looks_hears_why) {
  const FreshDriver fresh;
  const auto context = fresh.context();
  CopyStreams copies(context, -1);
  copies.look_for_loss();
  fake().hold(true);
  const uint32_t mark = copies.mark(kToHost);
  fake().lose(700);
  fake().hold(false);
  CHECK(!copies.reached(kToHost, mark));
  CHECK_THROWS(copies.look_for_loss(), Error, e.code() == ErrorCode::device);
}

TEST(device_is_found_by_an_address) {
  const FreshDriver fresh;
  fake().configure("devices", "2");
  const auto first = fresh.context(0), second = fresh.context(1);
  const auto near = allocate_device(first, kBytes, Sharing::none);
  const auto far = allocate_device(second, kBytes, Sharing::none);
  CHECK_EQUAL(device_of(first->driver(), near->address() + 5), 0);
  CHECK_EQUAL(device_of(first->driver(), far->address()), 1);
  int here = 0;
  CHECK_THROWS(device_of(first->driver(), reinterpret_cast<DevicePointer>(&here)), Error,
               e.code() == ErrorCode::invalid_argument &&
                   testing::contains(e.verdict(), "the CUDA driver knows no memory at 0x"));
}
