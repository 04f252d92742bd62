// A few ranks in this process, on each of the transports, with or without chaos.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_mpi.h"
#include "transport/chaos.h"
#include "transport/transports.h"

namespace testing {

/// The protection of TCP data in worlds that are made from now on.
inline farandole::Wire wire_of_worlds = farandole::Wire::plain;

/// The surroundings of `size` ranks that are threads, or turns of one thread.
class World {
 public:
  static constexpr size_t kArenaBytes = 64 * 1024 * 1024;
  static constexpr uint64_t kMpiWorld = 0x3141;

  explicit World(int size, size_t hub_ring_bytes = farandole::InprocHub::kRingBytes) {
    using namespace farandole;
    const auto segment = Segment::create(size, kArenaBytes);
    const auto hub = std::make_shared<InprocHub>(hub_ring_bytes);
    const auto mpi = std::make_shared<FakeMpi>(size);
    for (int rank = 0; rank < size; ++rank) {
      segment->page(rank).state.value = static_cast<uint64_t>(RankState::present);
      places_.push_back(
          {.rank = rank,
           .host = "here",
           .hub = hub,
           .arena = std::make_shared<Arena>(segment, rank),
           .mpi = std::make_shared<MpiPort>(std::make_unique<FakeMpiRank>(mpi, rank), rank, size,
                                            kMpiWorld, farandole::Key{})});
      members_.push_back({.rank = rank, .host = "here", .address = {}});
    }
  }

  int size() const { return static_cast<int>(places_.size()); }
  const std::vector<farandole::PeerInfo>& members() const { return members_; }
  const std::shared_ptr<farandole::Arena>& arena(int rank) const {
    return places_[static_cast<size_t>(rank)].arena;
  }

  /// `rank`'s transport of that row; with a plan, through chaos.
  std::unique_ptr<farandole::Transport> transport(const farandole::TransportRow& row, int rank,
                                                  const farandole::ChaosPlan* chaos) const {
    farandole::Surroundings here = places_[static_cast<size_t>(rank)];
    here.wire = wire_of_worlds;
    auto made = row.make(here);
    if (chaos == nullptr) return made;
    farandole::ChaosPlan plan = *chaos;
    plan.seed += static_cast<uint64_t>(rank) * 7919;
    return farandole::chaos_transport(std::move(made), plan);
  }

 private:
  std::vector<farandole::Surroundings> places_;
  std::vector<farandole::PeerInfo> members_;
};

/// Runs body(rank) on a thread per rank and joins them all.
template <typename Body>
void run_ranks(int size, Body body) {
  std::vector<std::thread> threads;
  for (int rank = 0; rank < size; ++rank)
    threads.emplace_back([rank, &body] {
      try {
        body(rank);
      } catch (const std::exception& error) {
        fail(__FILE__, __LINE__, "rank " + std::to_string(rank) + ": " + error.what());
      }
    });
  for (std::thread& thread : threads) thread.join();
}

}  // namespace testing
