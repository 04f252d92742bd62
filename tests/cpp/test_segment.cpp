#include <unistd.h>

#include <algorithm>
#include <thread>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "transport/segment.h"

using namespace farandole;

namespace {
constexpr size_t kArenaBytes = 1024 * 1024;
}

TEST(segment_is_seen_alike_through_two_mappings) {
  const auto ours = Segment::create(2, kArenaBytes);
  const auto theirs = Segment::attach(Fd(checked(::dup(ours->fd()), "dup")));
  CHECK_EQUAL(theirs->ranks(), 2);
  ours->arena(1)[17] = std::byte{42};
  CHECK(theirs->arena(1)[17] == std::byte{42});
  const auto offset = ours->offset_of(&ours->arena(1)[17], 1);
  CHECK(offset.has_value() && theirs->at(*offset, 1) == &theirs->arena(1)[17]);
}

TEST(segment_offsets_exist_only_for_what_lies_in_the_arenas) {
  const auto segment = Segment::create(2, kArenaBytes);
  const auto arena = segment->arena(1);
  int elsewhere = 0;
  CHECK(!segment->offset_of(&elsewhere, sizeof elsewhere));
  CHECK(segment->offset_of(arena.data(), arena.size()).has_value());
  CHECK(!segment->offset_of(arena.data(), arena.size() + 1));
  CHECK(!segment->offset_of(arena.data() + 1, SIZE_MAX));
  CHECK(!segment->offset_of(&segment->page(0), 8));
}

TEST(segment_directory_finds_what_is_published_until_it_is_withdrawn) {
  const auto segment = Segment::create(2, kArenaBytes);
  segment->page(0).state.value = static_cast<uint64_t>(RankState::present);
  CHECK(!segment->find(0, 7));
  segment->publish(0, 7, 4096);
  CHECK(segment->find(0, 7) == uint64_t{4096});
  CHECK(!segment->find(1, 7));
  CHECK(!segment->closed(0, 7));
  segment->close(0, 7);
  CHECK(segment->closed(0, 7) && segment->find(0, 7).has_value());
  segment->withdraw(0, 7);
  CHECK(segment->closed(0, 7) && !segment->find(0, 7));
  segment->publish(0, 8, 0);
  segment->page(0).state.value = static_cast<uint64_t>(RankState::gone);
  CHECK(segment->closed(0, 8));
}

TEST(segment_directory_says_when_it_is_full) {
  const auto segment = Segment::create(1, kArenaBytes);
  for (uint64_t key = 1; key <= kDirectoryEntries; ++key) segment->publish(0, key, 0);
  CHECK_THROWS(segment->publish(0, 5000, 0), Error, e.code() == ErrorCode::resource);
  segment->withdraw(0, 500);
  segment->publish(0, 5000, 0);
  CHECK(segment->find(0, 5000).has_value());
}

TEST(segment_attach_refuses_what_is_not_a_segment) {
  CHECK_THROWS(Segment::attach(make_event_fd()), Error, e.code() == ErrorCode::resource);
}

TEST(default_arenas_of_many_ranks_fit_into_a_process) {
  const size_t one = default_arena_bytes(1);
  CHECK(one >= size_t{16} << 20);
  for (const int ranks : {2, 64, 512, 4096}) {
    const size_t each = default_arena_bytes(ranks);
    CHECK(each <= one && each >= std::min(one, size_t{4} << 30));
    CHECK(each <= (size_t{1} << 45) / static_cast<size_t>(ranks));
  }
}

TEST(segment_keeps_its_size) {  // or else every rank that maps it may die of SIGBUS
  const auto segment = Segment::create(2, kArenaBytes);
  CHECK(::ftruncate(segment->fd(), 4096) != 0);
  CHECK(::ftruncate(segment->fd(), 64 << 20) != 0);
}

TEST(arena_hands_out_zeroes_again_and_joins_released_neighbours) {
  const auto segment = Segment::create(1, kArenaBytes);
  Arena arena(segment, 0);
  std::byte* a = arena.allocate(5000);
  std::byte* b = arena.allocate(1);
  std::byte* c = arena.allocate(kArenaBytes - 3 * 4096);
  CHECK_EQUAL(arena.bytes_in_use(), kArenaBytes);
  CHECK_THROWS(arena.allocate(1), Error, e.code() == ErrorCode::resource);
  std::fill_n(a, 5000, std::byte{1});
  arena.release(a);
  CHECK(std::all_of(a, a + 5000, [](std::byte x) { return x == std::byte{0}; }));
  arena.release(c);
  arena.release(b);
  CHECK_EQUAL(arena.bytes_in_use(), 0U);
  CHECK(arena.allocate(kArenaBytes) == a);
}

TEST(arena_serves_threads) {
  const auto segment = Segment::create(1, kArenaBytes);
  Arena arena(segment, 0);
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&arena, t] {
      for (int i = 0; i < 50; ++i) {
        std::byte* data = arena.allocate(static_cast<size_t>(4096 * (t + 1)));
        *data = static_cast<std::byte>(t);
        CHECK(*data == static_cast<std::byte>(t));
        arena.release(data);
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK_EQUAL(arena.bytes_in_use(), 0U);
  CHECK_EQUAL(arena.allocations(), 150U);
}
