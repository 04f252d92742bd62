// Worlds of several hosts, each a thread of this process with a segment of its own.
#include <array>
#include <memory>
#include <string>
#include <vector>

#include "check.h"
#include "control/control_mesh.h"
#include "control/host.h"
#include "engines.h"
#include "transport/tcp_door.h"

namespace farandole {
namespace {

constexpr SegmentSecret kSecret{std::byte{7}};

/// A rank alone on its host.
struct Place {
  std::shared_ptr<Segment> segment;
  Fd listener;
  TcpAddress::Bytes address{};
};

std::vector<Place> places(int size) {
  std::vector<Place> all;
  for (int r = 0; r < size; ++r) {
    Place place{
        Segment::create(size, testing::World::kArenaBytes, kSecret), listen_on_loopback(4), {}};
    place.address = TcpAddress::of_listener(place.listener.get()).bytes();
    all.push_back(std::move(place));
  }
  return all;
}

Host host_at(std::vector<Place>& all, int rank) {
  const int size = static_cast<int>(all.size());
  Place& mine = all[static_cast<size_t>(rank)];
  Host host{rank, {}, mine.segment, {.allowed = true, .preferred = true}, {}};
  for (int r = 0; r < size; ++r) {
    const TcpAddress::Bytes& at = all[static_cast<size_t>(r)].address;
    const bool here = r == rank;
    host.peers.push_back({{r, "host " + std::to_string(r), 1000 + r, {at.begin(), at.end()}},
                          usable_cpus(),
                          here ? make_event_fd() : Fd(),
                          Fd(),
                          here});
    if (here) continue;
    mine.segment->set_apart(r);
    mine.segment->show_address(r, at);
    mine.segment->show_state(r, RankState::present);
  }
  mine.segment->show_state(rank, RankState::present);
  std::vector<bool> here(static_cast<size_t>(size));
  here[static_cast<size_t>(rank)] = true;
  host.mesh = std::make_shared<ControlMesh>(
      mine.segment, rank, here,
      std::make_shared<TcpDoor>(mine.segment, rank, std::move(mine.listener)));
  host.mesh->meet(host.peers[static_cast<size_t>(rank)].doorbell.get(), testing::patience(), [] {});
  return host;
}

/// Runs body(world group) on a thread per host.
template <typename Body>
void run_hosts(int size, Body body) {
  std::vector<Place> all = places(size);
  testing::run_ranks(size, [&](int rank) {
    auto engine = std::make_shared<Engine>(host_at(all, rank),
                                           testing::engine_options(ProgressMode::automatic));
    body(Group::world(std::move(engine), {}, testing::patience()));
  });
}

Handle sum(Group& group, std::vector<int32_t>& data, const std::string& name = "") {
  Options options{{Collective::all_reduce}};
  options.name = name;
  const Buffer buffer = testing::buffer_of(data, DType::int32);
  return group.submit(buffer, buffer, options, true);
}

TEST(hosts_agree_and_reduce_over_connections) {
  for (const int size : {2, 3, 5}) {
    const testing::Note note("hosts ", size);
    run_hosts(size, [&](const std::shared_ptr<Group>& world) {
      for (const size_t count : {0U, 1U, 1001U, 300'007U}) {
        testing::Sum ours(world->rank(), size, count);
        CHECK_EQUAL(testing::error_of(sum(*world, ours.data)), "");
        CHECK(ours.is_right());
      }
    });
  }
}

TEST(hosts_refuse_what_they_disagree_on_in_the_same_words) {
  for (const int size : {2, 3, 4}) {
    const testing::Note note("hosts ", size);
    std::vector<std::string> errors(static_cast<size_t>(size));
    run_hosts(size, [&](const std::shared_ptr<Group>& world) {
      const bool last = world->rank() == size - 1;
      std::vector<int32_t> data(last ? 8 : 7, 1);
      errors[static_cast<size_t>(world->rank())] = testing::error_of(sum(*world, data, "x"));
      testing::Sum next(world->rank(), size, 10);  // the group lives on
      CHECK_EQUAL(testing::error_of(sum(*world, next.data)), "");
      CHECK(next.is_right());
    });
    for (const std::string& error : errors) CHECK_EQUAL(error, errors[0]);
    CHECK(errors[0].find("count of all_reduce 'x'") != std::string::npos);
  }
}

TEST(hosts_make_one_verdict_of_many_reports) {
  constexpr int kSize = 4;
  std::vector<std::string> errors(kSize);
  run_hosts(kSize, [&](const std::shared_ptr<Group>& world) {
    const int rank = world->rank();
    Context where;
    where.rank = rank;
    world->abort(Error(ErrorCode::aborted, "rank " + std::to_string(rank) + " gave up", where));
    std::vector<int32_t> data(3);
    try {
      errors[static_cast<size_t>(rank)] = testing::error_of(sum(*world, data));
    } catch (const Error& error) {  // it knew already
      errors[static_cast<size_t>(rank)] = error.what();
    }
    const Deadline all_have_it = testing::patience();
    while (!world->membership().detector->verdict() && !all_have_it.passed(now()))
      std::this_thread::yield();
  });
  CHECK(errors[0].find("gave up") != std::string::npos);
  for (const std::string& error : errors) CHECK_EQUAL(error, errors[0]);
}

TEST(hosts_know_what_a_rank_had_done_before_it_left) {
  run_hosts(3, [&](const std::shared_ptr<Group>& world) {
    for (int i = 0; i < 20; ++i) {
      testing::Sum ours(world->rank(), 3, 40'000);
      CHECK_EQUAL(testing::error_of(sum(*world, ours.data)), "");
    }
    world->engine()->leave();
  });
}

}  // namespace
}  // namespace farandole
