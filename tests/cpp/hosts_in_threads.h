// Hosts that are threads of this process: a rank alone on each, with a segment of its own.
#pragma once

#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "check.h"
#include "control/control_mesh.h"
#include "control/host.h"
#include "engines.h"
#include "transport/tcp_door.h"

namespace testing {

inline constexpr farandole::Key kSecret{std::byte{7}};

/// A rank alone on its host.
struct Place {
  std::shared_ptr<farandole::Segment> segment;
  std::vector<farandole::Fd> listeners;
  std::vector<std::byte> addresses;

  void listen(int family) {
    listeners.push_back(farandole::listen_on_loopback(family));
    show(farandole::TcpAddress::of_listener(listeners.back().get()));
  }
  void show(const farandole::TcpAddress& address) {
    const farandole::TcpAddress::Bytes bytes = address.bytes();
    addresses.insert(addresses.end(), bytes.begin(), bytes.end());
  }
};

inline std::vector<Place> places(int size) {
  std::vector<Place> all;
  for (int r = 0; r < size; ++r) {
    Place place{farandole::Segment::create(size, World::kArenaBytes, kSecret), {}, {}};
    place.listen(4);
    all.push_back(std::move(place));
  }
  return all;
}

inline farandole::Host host_at(std::vector<Place>& all, int rank, farandole::Wire wire) {
  const int size = static_cast<int>(all.size());
  Place& mine = all[static_cast<size_t>(rank)];
  farandole::Host host{rank, {}, mine.segment, {.allowed = true, .preferred = true}, {}};
  for (int r = 0; r < size; ++r) {
    const std::vector<std::byte>& at = all[static_cast<size_t>(r)].addresses;
    const bool here = r == rank;
    host.peers.push_back({{r, "host " + std::to_string(r), 1000 + r, at},
                          farandole::usable_cpus(),
                          here ? farandole::make_event_fd() : farandole::Fd(),
                          farandole::Fd(),
                          here});
    if (here) continue;
    mine.segment->set_apart(r);
    mine.segment->show_state(r, farandole::RankState::present);
  }
  mine.segment->show_state(rank, farandole::RankState::present);
  std::vector<bool> here(static_cast<size_t>(size));
  here[static_cast<size_t>(rank)] = true;
  farandole::TcpAddresses addresses;
  for (const Place& place : all) addresses.push_back(place.addresses);
  host.mesh = std::make_shared<farandole::ControlMesh>(
      mine.segment, rank, here,
      std::make_shared<farandole::TcpDoor>(mine.segment, rank, std::move(mine.listeners),
                                           addresses),
      farandole::ControlMeshOptions{.hides = wire == farandole::Wire::sealed});
  host.mesh->meet(host, patience(), [] {});
  return host;
}

/// Runs body(world group) on a thread per host.
template <typename Body>
void run_hosts(std::vector<Place> all, Body body, farandole::Wire wire = farandole::Wire::plain) {
  const int size = static_cast<int>(all.size());
  run_ranks(size, [&](int rank) {
    auto engine = std::make_shared<farandole::Engine>(
        host_at(all, rank, wire), engine_options(farandole::ProgressMode::automatic, wire));
    body(farandole::Group::world(std::move(engine), {}, patience()));
  });
}

template <typename Body>
void run_hosts(int size, Body body) {
  run_hosts(places(size), body);
}

inline farandole::Handle sum(farandole::Group& group, std::vector<int32_t>& data,
                             const std::string& name = "") {
  farandole::Options options{{farandole::Collective::all_reduce}};
  options.name = name;
  const farandole::Buffer buffer = buffer_of(data, farandole::DType::int32);
  return group.submit(buffer, buffer, options, true);
}

}  // namespace testing
