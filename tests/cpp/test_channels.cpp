// The guarantees of channel.h, for every transport of the table, with and without chaos.
#include <algorithm>
#include <random>

#include "base/error.h"
#include "check.h"
#include "transport/shm.h"
#include "transport/shm_channel.h"
#include "world.h"

using namespace farandole;
using testing::World;

namespace {

using Channels = std::vector<std::unique_ptr<Channel>>;
constexpr uint64_t kStream = 99;
constexpr int kLanes = 2;
constexpr int kSeeds = 4;  // 0 is without chaos
constexpr size_t kExchanged = testing::kSanitizer ? 100'001 : 700'001;

Channels wait_for(Connecting& connecting) {
  for (;;) {
    Channels channels = connecting.poll(now());
    if (!channels.empty()) return channels;
    std::this_thread::yield();
  }
}

/// The two ends of one connection, by rank.
struct Pair {
  Pair(const TransportRow& row, int seed, const World& in) {
    const ChaosPlan plan{
        .seed = static_cast<uint64_t>(seed) * 1000 + 1, .longest_write = 5000, .longest_read = 300};
    std::unique_ptr<Connecting> connecting[2];
    for (int rank : {0, 1}) {
      transports.push_back(in.transport(row, rank, seed == 0 ? nullptr : &plan));
      connecting[rank] =
          transports.back()->connect(in.members()[static_cast<size_t>(1 - rank)], kStream, kLanes);
    }
    for (int rank : {0, 1}) ends[rank] = wait_for(*connecting[rank]);
  }

  std::vector<std::unique_ptr<Transport>> transports;
  Channels ends[2];
};

const TransportRow& shm_row() {
  return *std::ranges::find(transports(), "shm", &TransportRow::name);
}

/// Two ranks with a channel through shared memory.
struct ShmPair {
  World world{2};
  Pair pair{shm_row(), 0, world};
  Channel& sender = *pair.ends[0][0];
  Channel& receiver = *pair.ends[1][0];
};

/// Lane 0 of the first block in a rank's arena.
ShmLane first_lane(const Segment& segment, int rank) {
  constexpr size_t kBlockHeader = 128;
  return shm_lane_at(segment.arena(rank).data() + kBlockHeader);
}

template <typename Body>
void for_each_transport(Body body) {
  for (const TransportRow& row : transports())
    for (const Wire wire : {Wire::plain, Wire::checked, Wire::sealed}) {
      if (wire != Wire::plain && row.name != "tcp") continue;
      testing::wire_of_worlds = wire;
      for (int seed = 0; seed < kSeeds; ++seed) {
        const testing::Note note("transport ", row.name, ", wire ", static_cast<int>(wire),
                                 ", chaos seed ", seed);
        body(row, seed);
      }
    }
  testing::wire_of_worlds = Wire::plain;
}

std::vector<std::byte> random_bytes(std::mt19937_64& random, size_t count) {
  std::vector<std::byte> bytes(count);
  std::ranges::generate(bytes, [&] { return static_cast<std::byte>(random()); });
  return bytes;
}

void send_all(Channel& channel, std::span<const std::byte> bytes) {
  while (!bytes.empty()) {
    const size_t taken = channel.write(bytes);
    if (taken == 0) std::this_thread::yield();
    bytes = bytes.subspan(taken);
  }
}

void wait_drained(Channel& channel) {
  while (!channel.drained()) std::this_thread::yield();
}

/// Takes `count` bytes, at random with read() or with peek() of elements.
std::vector<std::byte> receive_all(Channel& channel, size_t count, std::mt19937_64& random) {
  std::vector<std::byte> got(count);
  for (size_t done = 0; done < count;) {
    const std::span<std::byte> rest = std::span(got).subspan(done);
    size_t taken = 0;
    if (random() % 2 == 0) {
      taken = channel.read(rest.first(random() % rest.size() + 1));
    } else {
      const size_t element = size_t{1} << random() % 4;
      const auto arrived = channel.peek(std::min(element, rest.size()));
      if (!arrived.empty()) CHECK(arrived.size() >= std::min(element, rest.size()));
      taken = std::min(arrived.size(), rest.size());
      taken = random() % (taken + 1);
      std::copy_n(arrived.begin(), taken, rest.begin());
      channel.consume(taken);
    }
    if (taken == 0) std::this_thread::yield();
    done += taken;
  }
  return got;
}

/// Each rank writes runs of odd and even lengths, and reads the peer's in lengths of its own. The
/// writer's memory, in its arena or not, is overwritten as soon as the channel is drained.
void exchange(const TransportRow& row, int seed, size_t total, bool from_arena) {
  const World world(2, 8 * 1024);
  Pair pair(row, seed, world);
  std::mt19937_64 make(static_cast<uint64_t>(seed) + 5);
  const std::vector<std::byte> sent[2] = {random_bytes(make, total), random_bytes(make, total)};
  testing::run_ranks(2, [&](int rank) {
    std::mt19937_64 random(static_cast<uint64_t>(seed * 2 + rank));
    Channel& channel = *pair.ends[rank][0];
    std::vector<std::byte> heap(total + 1);
    std::byte* memory = from_arena ? world.arena(rank)->allocate(total + 1) : heap.data();
    std::thread reader;
    std::vector<std::byte> got;
    size_t received = 0;
    got.reserve(total);
    for (size_t done = 0; done < total;) {
      const size_t run = std::min(total - done, size_t{1} << random() % 18 | random() % 8);
      std::copy_n(sent[rank].begin() + static_cast<std::ptrdiff_t>(done), run, memory);
      // Both directions at once, as a step of a schedule does.
      for (size_t out = 0; out < run || !channel.drained();) {
        size_t moved = 0;
        if (out < run) moved = channel.write({memory + out, run - out});
        out += moved;
        if (received < total) {
          const auto arrived = channel.peek(1);
          const size_t taken = std::min(arrived.size(), total - received);
          got.insert(got.end(), arrived.begin(),
                     arrived.begin() + static_cast<std::ptrdiff_t>(taken));
          channel.consume(taken);
          received += taken;
          moved += taken;
        }
        if (moved == 0) std::this_thread::yield();
      }
      std::fill_n(memory, run, std::byte{0xee});
      done += run;
    }
    const auto rest = receive_all(channel, total - received, random);
    got.insert(got.end(), rest.begin(), rest.end());
    CHECK(got == sent[1 - rank]);
    CHECK(channel.peek(1).empty());
    if (from_arena) world.arena(rank)->release(memory);
  });
}

}  // namespace

TEST(channels_carry_small_big_and_odd_runs_in_order) {
  for_each_transport([](const TransportRow& row, int seed) {
    const World world(2, 4096);
    Pair pair(row, seed, world);
    std::mt19937_64 make(static_cast<uint64_t>(seed) + 17);
    std::vector<std::vector<std::byte>> runs;
    for (const size_t length : {1, 2, 3, 7, 8, 9, 4095, 4096, 4097, 16 * 1024 + 1, 100'003})
      runs.push_back(random_bytes(make, length));
    testing::run_ranks(2, [&](int rank) {
      std::mt19937_64 random(static_cast<uint64_t>(seed) + 23);
      Channel& channel = *pair.ends[rank][0];
      for (const auto& run : runs) {
        if (rank == 0) {
          send_all(channel, run);
          wait_drained(channel);
        } else {
          CHECK(receive_all(channel, run.size(), random) == run);
        }
      }
    });
  });
}

TEST(channels_go_both_ways_at_once_and_wrap) {
  for_each_transport(
      [](const TransportRow& row, int seed) { exchange(row, seed, kExchanged, false); });
}

TEST(channels_read_arena_memory_before_they_say_drained) {
  for_each_transport(
      [](const TransportRow& row, int seed) { exchange(row, seed, kExchanged, true); });
}

TEST(channels_of_two_lanes_do_not_wait_for_each_other) {
  for_each_transport([](const TransportRow& row, int seed) {
    const World world(2, 4096);
    Pair pair(row, seed, world);
    std::mt19937_64 random(3);
    const auto flood = random_bytes(random, 1 << 20);
    // No rank reads lane 0, so it fills up; until then chaos refuses a write now and then.
    size_t taken = 0;
    for (int refused = 0; refused < 200;) {
      const size_t more = pair.ends[0][0]->write(std::span(flood).subspan(taken));
      refused = more == 0 ? refused + 1 : 0;
      taken += more;
      if (taken == flood.size()) break;
    }
    const auto word = random_bytes(random, 8);
    send_all(*pair.ends[0][1], word);
    for (std::span<const std::byte> arrived; arrived.empty();) {
      pair.ends[0][1]->drained();
      arrived = pair.ends[1][1]->peek(8);
      if (!arrived.empty()) CHECK(std::ranges::equal(arrived.first(8), word));
    }
  });
}

TEST(channels_deliver_what_was_written_before_the_writer_closed) {
  for (const TransportRow& row : transports()) {
    const testing::Note note("transport ", row.name);
    const World world(2);
    Pair pair(row, 0, world);
    std::mt19937_64 random(4);
    const auto word = random_bytes(random, 3000);
    send_all(*pair.ends[0][0], word);
    pair.ends[0].clear();
    pair.transports[0].reset();
    CHECK(receive_all(*pair.ends[1][0], word.size(), random) == word);
  }
}

TEST(chaos_cuts_at_the_byte_it_was_told) {
  for (const TransportRow& row : transports()) {
    const testing::Note note("transport ", row.name);
    const World world(2);
    const ChaosPlan plan{.seed = 8, .cut_at = 1001};
    const auto left = world.transport(row, 0, &plan), right = world.transport(row, 1, nullptr);
    const auto a = left->connect(world.members()[1], kStream, 1);
    const auto b = right->connect(world.members()[0], kStream, 1);
    const Channels out = wait_for(*a), in = wait_for(*b);
    std::mt19937_64 random(4);
    const auto bytes = random_bytes(random, 2000);
    CHECK_THROWS(send_all(*out[0], bytes), Error,
                 e.code() == ErrorCode::link && e.where().peer == 1);
    wait_drained(*out[0]);
    const auto got = receive_all(*in[0], 1001, random);
    CHECK(std::ranges::equal(got, std::span(bytes).first(1001)));
    CHECK(in[0]->peek(1).empty());
  }
}

TEST(shm_gives_its_blocks_back_when_both_sides_have_closed) {
  const World world(2);
  const TransportRow& shm = shm_row();
  {
    Pair pair(shm, 0, world);
    CHECK(world.arena(0)->bytes_in_use() >= kLanes * kShmRingBytes);
    pair.ends[0].clear();
    CHECK(world.arena(0)->bytes_in_use() > 0);  // the other side may still read
    pair.ends[1].clear();
    CHECK_EQUAL(world.arena(1)->bytes_in_use(), 0U);
  }
  CHECK_EQUAL(world.arena(0)->bytes_in_use(), 0U);
}

TEST(shm_keeps_a_block_for_a_peer_that_may_still_come) {
  const World world(2);
  const auto ours = shm_transport(world.arena(0), 0, "here");
  ours->connect(world.members()[1], kStream, 1).reset();
  const size_t one = world.arena(0)->bytes_in_use();
  CHECK(one > 0);
  const auto segment = world.arena(0)->segment();
  segment->page(1).state.value = static_cast<uint64_t>(RankState::gone);
  auto other = ours->connect(world.members()[1], kStream + 1, 1);  // sweeps
  CHECK_EQUAL(world.arena(0)->bytes_in_use(), one);
  other.reset();
  ours->connect(world.members()[1], kStream + 2, 1).reset();
  CHECK_EQUAL(world.arena(0)->bytes_in_use(), 0U);
}

TEST(shm_believes_no_index_length_or_offset_unseen) {
  const World world(2);
  const TransportRow& shm = shm_row();
  const auto segment = world.arena(0)->segment();
  struct Case {
    uint64_t written, header, offset;
  };
  const Case cases[] = {
      {kShmRingBytes + 8, 0, 0},        // more than a ring holds
      {8, 16 << 2, 0},                  // an inline frame longer than what has arrived
      {16, (1ULL << 40) << 2, 0},       // longer than any frame
      {16, 0, 0},                       // empty
      {8, 64 << 2 | 1, 0},              // a reference without its offset
      {16, 64 << 2 | 1, 0},             // into the control pages
      {16, 64 << 2 | 1, ~0ULL},         // beyond everything
      {16, (~0ULL << 2) | 1, 1 << 20},  // with no end
      {8, 64 << 2 | 2, 0},              // delivered where nothing was offered
      {8, 64 << 2 | 3, 0},              // of no kind
  };
  for (const Case& wrong : cases) {
    const testing::Note note("written ", wrong.written, ", header ", wrong.header);
    Pair pair(shm, 0, world);
    const ShmLane lane = first_lane(*segment, 0);
    std::memcpy(lane.ring.data(), &wrong.header, sizeof wrong.header);
    std::memcpy(lane.ring.data() + 8, &wrong.offset, sizeof wrong.offset);
    lane.control.written = wrong.written;
    CHECK_THROWS(pair.ends[1][0]->peek(1), Error, e.code() == ErrorCode::resource);
  }
}

TEST(shm_puts_what_a_receiver_has_offered_a_place_for) {
  constexpr size_t kBytes = 40'000;
  ShmPair shm;
  const std::span<std::byte> from(shm.world.arena(0)->allocate(kBytes), kBytes);
  const std::span<std::byte> to(shm.world.arena(1)->allocate(kBytes), kBytes);
  std::mt19937_64 random(7);
  for (int round = 0; round < 3; ++round) {
    std::ranges::copy(random_bytes(random, kBytes), from.begin());
    send_all(shm.sender, from.first(100));  // so that the index is not 0
    receive_all(shm.receiver, 100, random);
    CHECK(!shm.sender.place_for(from));  // not offered yet
    shm.receiver.offer(to.data(), kBytes);
    for (const size_t count : {size_t{1}, size_t{30'000}, kBytes}) {
      const size_t done = count == 1 ? 0 : count == kBytes ? 30'001 : 1;
      const auto rest = std::span<const std::byte>(from).subspan(done);
      const auto place = shm.sender.place_for(rest.first(std::min(count, rest.size())));
      CHECK(place && place->data() == to.data() + done);
      std::ranges::copy(rest.first(place->size()), place->begin());
      CHECK(shm.receiver.peek(1).empty());  // until it is announced
      shm.sender.delivered(place->size());
      CHECK(shm.sender.drained());  // the sender's own memory is in no use
      CHECK_EQUAL(shm.receiver.read(to.subspan(done)), place->size());
    }
    CHECK(std::ranges::equal(from, to));
    CHECK(!shm.sender.place_for(from));
  }
}

TEST(shm_puts_nothing_where_it_is_not_wanted_or_not_reached) {
  constexpr size_t kBytes = 8'000;
  ShmPair shm;
  const std::span<std::byte> ours(shm.world.arena(0)->allocate(kBytes), kBytes);
  std::vector<std::byte> heap(kBytes), got(kBytes);
  CHECK(shm.sender.place_for(heap)->empty());  // without waiting
  std::mt19937_64 random(8);
  for (std::byte* const place : {static_cast<std::byte*>(nullptr), got.data()}) {
    std::ranges::copy(random_bytes(random, kBytes), ours.begin());
    shm.receiver.offer(place, kBytes);
    for (size_t done = 0; done < kBytes; done += 4'000) {
      const auto part = std::span<const std::byte>(ours).subspan(done, 4'000);
      CHECK(shm.sender.place_for(part)->empty());
      send_all(shm.sender, part);
    }
    got = receive_all(shm.receiver, kBytes, random);
    CHECK(std::ranges::equal(got, ours));
  }
}

TEST(shm_puts_only_into_the_memory_of_who_offers_it) {
  const World world(2);
  const auto segment = world.arena(0)->segment();
  const std::span<std::byte> from(world.arena(0)->allocate(4096), 4096);
  const auto begin = *segment->offset_of(segment->arena(1).data(), 1);
  const uint64_t end = begin + segment->arena(1).size();
  const std::pair<uint64_t, uint64_t> cases[] = {
      {0, 4096},                                    // the control pages
      {*segment->offset_of(from.data(), 1), 4096},  // the sender's own
      {end - 4095, 4096},
      {end, 1},
      {begin, ~0ULL - 8},
      {~0ULL - 1, 4096}};
  for (const auto& [place, count] : cases) {
    const testing::Note note("offset ", place, ", bytes ", count);
    Pair pair(shm_row(), 0, world);
    Offer& offer = first_lane(*segment, 1).offer;
    offer.place = place + 1;
    offer.count = count;
    offer.begin = 1;
    CHECK_THROWS(pair.ends[0][0]->place_for(from), Error, e.code() == ErrorCode::resource);
  }
}

TEST(shm_believes_in_no_more_bytes_than_were_offered) {
  ShmPair shm;
  shm.receiver.offer(shm.world.arena(1)->allocate(4096), 4096);
  shm.sender.delivered(4097);
  CHECK_THROWS(shm.receiver.peek(1), Error, e.code() == ErrorCode::resource);
}

TEST(shm_refuses_a_connection_of_another_shape) {
  const World world(2);
  const auto left = shm_transport(world.arena(0), 0, "here");
  const auto right = shm_transport(world.arena(1), 1, "here");
  const auto a = left->connect(world.members()[1], kStream, 1);
  const auto b = right->connect(world.members()[0], kStream, 2);
  CHECK_THROWS(b->poll(now()), Error, e.code() == ErrorCode::link);
}

TEST(shm_reaches_its_host_only) {
  const World world(2);
  const auto shm = shm_transport(world.arena(0), 0, "here");
  CHECK(shm->reaches({.rank = 1, .host = "here", .address = {}}));
  CHECK(!shm->reaches({.rank = 1, .host = "there", .address = {}}));
  CHECK(!shm->reaches({.rank = 2, .host = "here", .address = {}}));
}
