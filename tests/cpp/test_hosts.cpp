// Worlds of several hosts, each a thread of this process with a segment of its own.
#include <netinet/in.h>
#include <sys/socket.h>

#include <array>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "hosts_in_threads.h"

namespace farandole {
namespace {

using testing::Place;
using testing::places;
using testing::run_hosts;
using testing::sum;

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

/// An address on which a connection waits until its other end gives up.
struct Silent {
  Silent() : listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0)) {
    sockaddr_in loopback{};
    loopback.sin_family = AF_INET;
    loopback.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
    checked(::bind(listener.get(), reinterpret_cast<sockaddr*>(&loopback), sizeof loopback),
            "bind");
    checked(::listen(listener.get(), 0), "listen");
    for (Fd& first : queue) first = begin_to_connect(address());  // the kernel takes no more
  }
  TcpAddress address() const { return TcpAddress::of_listener(listener.get()); }
  Fd listener;
  Fd queue[2];
};

void meet_and_reduce(std::vector<Place> all) {
  const int size = static_cast<int>(all.size());
  run_hosts(std::move(all), [&](const std::shared_ptr<Group>& world) {
    testing::Sum ours(world->rank(), size, 100'001);
    CHECK_EQUAL(testing::error_of(sum(*world, ours.data)), "");
    CHECK(ours.is_right());
  });
}

TEST(hosts_try_one_address_of_a_rank_after_the_other) {
  const Silent silent;
  const TcpAddress nobody = TcpAddress::of_listener(listen_on_loopback(4).get());
  std::vector<Place> all = places(3);
  const TcpAddress of_another = TcpAddress::from(all[1].addresses).value();
  for (size_t r = 1; r < all.size(); ++r) {
    Place& place = all[r];
    const std::vector<std::byte> reached = std::exchange(place.addresses, {});
    place.show(nobody);
    place.show(silent.address());
    if (r == 2) place.show(of_another);
    place.addresses.insert(place.addresses.end(), reached.begin(), reached.end());
  }
  meet_and_reduce(std::move(all));
}

TEST(hosts_are_reached_by_either_family) {
  std::vector<Place> all = places(2);
  try {
    all[1].listen(6);
  } catch (const Error&) {
    return;  // a host may have no IPv6
  }
  all[1].listeners.erase(all[1].listeners.begin());  // nobody is at the first address any more
  meet_and_reduce(std::move(all));
}

TEST(hosts_refuse_another_rank_at_all_addresses_of_one) {
  std::vector<Place> all = places(3);
  all[2].addresses.clear();
  for (int i = 0; i < 2; ++i) all[2].show(TcpAddress::from(all[1].addresses).value());
  testing::run_ranks(3, [&](int rank) {
    if (rank == 2) return;
    const auto segment = all[static_cast<size_t>(rank)].segment;
    TcpAddresses addresses;
    for (const Place& place : all) addresses.push_back(place.addresses);
    TcpDoor door(segment, rank, std::move(all[static_cast<size_t>(rank)].listeners), addresses);
    if (rank == 1) {
      const auto told = door.await({0, 1, 5, 0});
      const Deadline patience = testing::patience();
      while (!told->here.load() && !patience.passed(now())) std::this_thread::yield();
      return;
    }
    const auto refused = door.await({0, 2, 5, 0});
    const Deadline patience = testing::patience();
    while (!refused->here.load() && !patience.passed(now())) std::this_thread::yield();
    CHECK(refused->error);
    CHECK_EQUAL(refused->error->where().field, "rank that listens");
    const auto reached = door.await({0, 1, 5, 0});
    while (!reached->here.load() && !patience.passed(now())) std::this_thread::yield();
    CHECK(reached->connection.socket);
  });
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
