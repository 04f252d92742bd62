#include <algorithm>
#include <memory>
#include <random>
#include <thread>
#include <vector>

#include "base/byte_ring.h"
#include "check.h"

using namespace farandole;

namespace {

struct Ring {
  explicit Ring(size_t capacity) : data(capacity) {}
  std::unique_ptr<RingControl> control = std::make_unique<RingControl>();
  std::vector<std::byte> data;
  RingWriter writer{*control, data};
  RingReader reader{*control, data};
};

std::vector<std::byte> counting(size_t count, size_t from = 0) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>((from + i) * 131 >> 3);
  return bytes;
}

bool equal(std::span<const std::byte> a, std::span<const std::byte> b) {
  return std::ranges::equal(a, b);
}

}  // namespace

TEST(byte_ring_takes_the_prefix_there_is_room_for) {
  Ring ring(64);
  const auto bytes = counting(100);
  CHECK_EQUAL(ring.writer.write(bytes), 64U);
  CHECK_EQUAL(ring.writer.write(bytes), 0U);
  ring.reader.peek(1);
  ring.reader.consume(10);
  CHECK_EQUAL(ring.writer.write(std::span(bytes).subspan(64)), 10U);
}

TEST(byte_ring_shows_nothing_below_what_is_asked_for) {
  Ring ring(64);
  CHECK(ring.reader.peek(1).empty());
  const auto bytes = counting(7);
  ring.writer.write(bytes);
  CHECK(ring.reader.peek(8).empty());
  CHECK(equal(ring.reader.peek(7), bytes));
  CHECK(equal(ring.reader.peek(1), bytes));
}

TEST(byte_ring_joins_an_element_that_the_end_splits) {
  Ring ring(64);
  ring.writer.write(counting(61));
  ring.reader.peek(1);
  ring.reader.consume(61);
  const auto bytes = counting(8);
  CHECK_EQUAL(ring.writer.write(bytes), 8U);
  CHECK(equal(ring.reader.peek(8), bytes));
  CHECK_EQUAL(ring.reader.peek(1).size(), 3U);
  ring.reader.consume(8);
  CHECK(ring.reader.peek(1).empty());
}

TEST(byte_ring_shows_bytes_only_when_published) {
  Ring ring(64);
  const auto bytes = counting(5);
  ring.writer.put(bytes);
  CHECK(ring.reader.peek(1).empty());
  ring.writer.publish();
  CHECK(equal(ring.reader.peek(5), bytes));
  CHECK(!ring.writer.consumed_to(ring.writer.written()));
  ring.reader.consume(5);
  CHECK(ring.writer.consumed_to(ring.writer.written()));
}

TEST(byte_ring_refuses_indices_that_cannot_be) {
  for (const uint64_t wild : {uint64_t{65}, ~uint64_t{0}, uint64_t{1} << 40}) {
    Ring ring(64);
    ring.control->written = wild;
    CHECK_THROWS(ring.reader.peek(1), Error, e.code() == ErrorCode::resource);
    ring.control->consumed = wild;
    CHECK_THROWS(ring.writer.room(65), Error, e.code() == ErrorCode::resource);
  }
}

TEST(byte_ring_carries_bytes_between_threads_in_order) {
  constexpr size_t kTotal = 400'000;
  const uint64_t seed = std::random_device{}();
  const testing::Note note("seed ", seed);
  Ring ring(1024);
  const auto sent = counting(kTotal);
  std::thread producer([&] {
    std::mt19937_64 random(seed);
    for (size_t done = 0; done < kTotal;) {
      const size_t wish = std::min<size_t>(kTotal - done, random() % 1500 + 1);
      const size_t taken = ring.writer.write(std::span(sent).subspan(done, wish));
      if (taken == 0) std::this_thread::yield();
      done += taken;
    }
  });
  std::mt19937_64 random(seed + 1);
  std::vector<std::byte> got;
  while (got.size() < kTotal) {
    const auto arrived = ring.reader.peek(std::min<size_t>(random() % 8 + 1, kTotal - got.size()));
    const size_t taken = std::min<size_t>(arrived.size(), random() % 700 + 1);
    got.insert(got.end(), arrived.begin(), arrived.begin() + static_cast<std::ptrdiff_t>(taken));
    ring.reader.consume(taken);
    if (taken == 0) std::this_thread::yield();
  }
  producer.join();
  CHECK(equal(got, sent));
}
