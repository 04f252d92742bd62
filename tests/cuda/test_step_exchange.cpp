// Exchanges in streams over the fake driver, by ranks that are threads: who waits for whom, what
// ends when nobody comes; and how ranks come by each other's buckets, and by NCCL.
#include <fcntl.h>
#include <poll.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "backends/mesh.h"
#include "base/dtype.h"
#include "control/host.h"
#include "cuda/exchange/exchange.h"
#include "devices/nccl_meeting.h"
#include "devices/peers.h"
#include "fake.h"
#include "step_ranks.h"
#include "transport/shm.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::comes;
using testing::contains;
using testing::fake;
using testing::FreshDriver;
using testing::kCount;
using testing::kImage;
using testing::StepRank;
using testing::StepRanks;

TEST(step_exchange_orders_ranks_by_flags_alone) {
  for (const char* seed : {"1", "2", "3"}) {
    constexpr int kSize = 3;
    StepRanks ranks(kSize);
    fake().configure("jitter", seed);
    std::vector<std::thread> threads;
    for (int r = 0; r < kSize; ++r)
      threads.emplace_back([&, r] {
        StepRank& me = ranks.all[static_cast<size_t>(r)];
        for (int round = 0; round < 3; ++round) {
          const testing::Note note("seed ", seed, ", rank ", r, ", round ", round);
          me.put(static_cast<float>(8 * r + round));
          me.launch(r, kSize);
          me.launch(r, kSize);  // of what the one before has left
          me.get();
          me.owner.synchronize();
          const bool idle = me.exchange.is_idle();  // before the look at what then has come
          CHECK(me.exchange.is_complete(me.newest) || !idle);
          bool right = true;
          for (size_t i = 0; i < kCount; ++i) {
            const float once =
                0.5F * (24.0F + 3.0F * (static_cast<float>(round) + static_cast<float>(i)));
            right &= me.values()[i] == 0.5F * 3.0F * once;
          }
          CHECK(right);
        }
      });
    for (std::thread& thread : threads) thread.join();
  }
}

/// A thread that waits for room in a stream sleeps, in the middle of an operation, too.
TEST(step_exchange_rings_before_an_operation_ends) {
  constexpr int kSize = 2;
  StepRanks ranks(kSize);
  for (int r = 0; r < kSize; ++r) {
    StepRank& me = ranks.all[static_cast<size_t>(r)];
    me.moments.push_back(me.exchange.moments({me.owner.handle()}));
    me.exchange.begin(*me.moments.back(), 2);
    for (int i = 0; i < 20; ++i) me.run_pieces(r, kSize);
  }
  pollfd rung{ranks.doorbell.get(), POLLIN, 0};
  CHECK(comes([&] { return ::poll(&rung, 1, 0) == 1; }));
  for (StepRank& rank : ranks.all) rank.newest = rank.exchange.end(*rank.moments.back());
  for (StepRank& rank : ranks.all)  // else the first to end drains what the other one still reads
    CHECK(comes([&] { return rank.exchange.is_complete(rank.newest); }));
}

TEST(step_exchange_runs_schedules_by_turns_with_steps) {
  for (const char* seed : {"4", "5"})
    for (const char* planner : {"halving_doubling", "double_tree", "direct"}) {
      constexpr int kSize = 3;
      StepRanks ranks(kSize);
      fake().configure("jitter", seed);
      std::vector<std::thread> threads;
      for (int r = 0; r < kSize; ++r)
        threads.emplace_back([&, r] {
          StepRank& me = ranks.all[static_cast<size_t>(r)];
          for (int round = 0; round < 2; ++round) {
            const testing::Note note("seed ", seed, ", ", planner, ", rank ", r);
            me.put(static_cast<float>(8 * r));
            me.launch(r, kSize);
            me.launch_lanes(planner);
            me.launch_lanes(planner);
            me.launch(r, kSize);
            me.get();
            me.owner.synchronize();
            bool right = true;
            for (size_t i = 0; i < kCount; ++i) {
              const float once = 0.5F * (24.0F + 3.0F * static_cast<float>(i));
              right &= me.values()[i] == 1.5F * 1.5F * 1.5F * once;
            }
            CHECK(right);
          }
        });
      for (std::thread& thread : threads) thread.join();
    }
}

TEST(step_exchange_runs_more_schedules_than_it_keeps) {
  constexpr int kSize = 2;
  StepRanks ranks(kSize);
  std::vector<std::thread> threads;
  for (int r = 0; r < kSize; ++r)
    threads.emplace_back([&, r] {
      StepRank& me = ranks.all[static_cast<size_t>(r)];
      me.put(1);
      for (int round = 0; round < 3; ++round)
        for (size_t first = 0; first < 100; ++first)
          me.launch_lanes("halving_doubling", kCount - 1 - first);
      me.get();
      me.owner.synchronize();
      bool right = true;
      for (size_t i = 0; i < kCount; ++i)  // half of a sum of two that are equal
        right &= me.values()[i] == 1 + static_cast<float>(i);
      CHECK(right);
    });
  for (std::thread& thread : threads) thread.join();
}

TEST(step_exchange_knows_who_is_late) {
  if (testing::kThreadSanitizer) return;  // flags are read while they may be written
  using Launch = void (*)(StepRank&, int);
  const Launch steps = [](StepRank& me, int r) { me.launch(r, 3); };
  const Launch lanes = [](StepRank& me, int) { me.launch_lanes("ring"); };
  for (const Launch launch : {steps, lanes})
    for (const uint64_t late : {0b010, 0b110, 0b101, 0b111, 0b000}) {
      const testing::Note note(launch == steps ? "steps" : "lanes", ", late: ", late);
      StepRanks ranks(3);
      const DeviceStream gate(ranks.context);
      const PinnedMemory word(ranks.context, sizeof(uint32_t));
      for (int r = 0; r < 3; ++r) {
        StepRank& me = ranks.all[static_cast<size_t>(r)];
        me.put(1);
        launch(me, r);  // once, so that all have met
      }
      for (StepRank& me : ranks.all) {
        me.get();
        me.owner.synchronize();
      }
      for (int r = 0; r < 3; ++r) {
        StepRank& me = ranks.all[static_cast<size_t>(r)];
        if ((late >> r & 1) != 0) me.owner.wait(word.address(), 1);
        launch(me, r);
      }
      for (int r = 0; r < 3; ++r) {
        const testing::Note rank("as seen by rank ", r);
        Exchange& here = ranks.all[static_cast<size_t>(r)].exchange;
        CHECK(comes([&] { return here.look_for_late() == late; }));
      }
      gate.write(word.address(), 1);
      for (StepRank& me : ranks.all) {
        me.get();
        me.owner.synchronize();
        CHECK(comes([&] { return me.exchange.look_for_late() == uint64_t{0}; }));
      }
    }
}

TEST(step_exchange_does_not_know_who_is_late_while_the_device_is_silent) {
  StepRanks ranks(2);
  fake().hold(true);
  for (int looks = 0; looks < 3; ++looks) CHECK(!ranks.all[0].exchange.look_for_late());
  fake().hold(false);
}

TEST(step_exchange_ends_lanes_that_wait_for_a_rank_that_does_not_come) {
  if (testing::kThreadSanitizer) return;  // as above
  StepRanks ranks(2);
  StepRank& here = ranks.all[0];
  here.put(1);
  here.launch_lanes("ring");
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(!here.exchange.is_complete(here.newest));
  for (int looks = 0; looks < 10000 && !here.exchange.is_idle(); ++looks) {
    here.exchange.drain();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(here.exchange.is_complete(here.newest));
}

TEST(step_exchange_tells_when_its_operations_ran) {
  StepRanks ranks(2);
  fake().configure("jitter", "7");
  const TimePoint begin = now();
  std::vector<std::thread> threads;
  for (int r = 0; r < 2; ++r)
    threads.emplace_back([&, r] {
      StepRank& me = ranks.all[static_cast<size_t>(r)];
      me.put(1);
      for (int round = 0; round < 3; ++round) me.launch(r, 2, Timing::on);
      me.get();
      me.owner.synchronize();
      TimePoint reached = begin;
      for (const auto& moments : me.moments) {
        const auto at = [&](const DeviceEvent& event) { return moments->since->time_of(event); };
        CHECK(at(moments->ready.front()) <= at(*moments->begun));
        CHECK(reached <= at(*moments->begun));
        reached = at(moments->complete);
        CHECK(at(*moments->begun) <= reached);
        CHECK(reached - begin < std::chrono::seconds(60));
      }
    });
  for (std::thread& thread : threads) thread.join();
  CHECK(ranks.all[0].moments[0]->since == ranks.all[0].moments[2]->since);
}

TEST(step_exchange_leaves_no_stream_waiting_for_a_rank_that_does_not_come) {
  // A collective that drains may read what is being written: by design, since nobody uses it.
  if (testing::kThreadSanitizer) return;
  StepRanks ranks(2);
  StepRank &here = ranks.all[0], &late = ranks.all[1];
  here.put(1);
  here.launch(0, 2);
  here.launch(0, 2);
  std::this_thread::sleep_for(std::chrono::milliseconds(5));
  CHECK(!here.exchange.is_idle());
  CHECK(!here.exchange.is_complete(here.newest));
  // A late rank writes its own numbers over what drains: once is not enough.
  late.put(1);
  late.launch(1, 2);
  late.exchange.drain();
  for (int looks = 0; looks < 10000 && !here.exchange.is_idle(); ++looks) {
    here.exchange.drain();
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  }
  CHECK(here.exchange.is_complete(here.newest));
}

TEST(step_exchange_drains_when_it_ends) {
  StepRanks ranks(2);
  ranks.all[0].put(1);
  ranks.all[0].launch(0, 2);
}

TEST(ranks_that_share_a_device_let_its_streams_wait) {
  const FreshDriver fresh;
  fake().configure("memory_operations", "0");
  const Fd doorbell = make_event_fd();
  std::deque<StepRank> all;
  for (int r = 0; r < 2; ++r) {
    all.emplace_back(fresh.context(), r, 2, doorbell.get(), testing::StepsRun::now);
    all.back().exchange.open_bucket(kImage);
  }
  CHECK_THROWS(all[0].exchange.map(1, all[1].exchange.share(), 4), Error,
               e.code() == ErrorCode::device &&
                   contains(e.verdict(), "device 0 (Fake GPU) cannot let streams wait for words"));
}

TEST(step_exchange_without_a_bucket_has_any_number_of_ranks) {
  const FreshDriver fresh;
  const Fd doorbell = make_event_fd();
  StepRank me(fresh.context(), 99, 100, doorbell.get(), testing::StepsRun::now);
  me.put(1);
  me.moments.push_back(me.exchange.moments({me.owner.handle()}));
  me.exchange.begin(*me.moments.back(), 1);
  me.newest = me.exchange.end(*me.moments.back());
  me.get();
  me.owner.synchronize();
  me.exchange.drain();
  for (int looks = 0; looks < 10000 && !me.exchange.is_complete(me.newest); ++looks)
    std::this_thread::sleep_for(std::chrono::milliseconds(1));
  CHECK(me.exchange.is_complete(me.newest));
}

// ---- buckets by descriptor ----

namespace {

/// By this rank's thread, as the others do by theirs.
template <typename Meeting>
void come_to_its_end(Meeting& meeting) {
  const Deadline patience = Deadline::after(std::chrono::seconds(60));
  do {
    meeting.poll();
    std::this_thread::yield();
  } while (!meeting.done() && !patience.passed(now()));
}

struct Found {
  std::string refusal;
  uint32_t notes = 0;
  std::vector<std::string> contents;
};

/// Each rank's bucket is a file with its owner's number, which the others map.
std::vector<Found> meet(int size, int refuses, int cannot_map, int sees_loss = -1) {
  constexpr size_t kArena = 1 << 20;
  const std::vector<Host> hosts = hosts_in_process(size, kArena);
  std::vector<Found> found(static_cast<size_t>(size));
  std::vector<std::thread> threads;
  for (int r = 0; r < size; ++r)
    threads.emplace_back([&, r] {
      Found& mine = found[static_cast<size_t>(r)];
      mine.contents.resize(static_cast<size_t>(size));
      Membership membership;
      membership.rank = r;
      for (int member = 0; member < size; ++member) membership.members.push_back(member);
      PeerOffer bucket;
      bucket.put(static_cast<uint64_t>(r) + 40);
      if (r == refuses)
        bucket.refusal = "no room";
      else
        bucket.descriptor = Fd(::memfd_create("bucket", MFD_CLOEXEC));
      const std::string text = "of " + std::to_string(r);
      if (bucket.descriptor)
        CHECK_EQUAL(::pwrite(bucket.descriptor.get(), text.data(), text.size(), 0),
                    static_cast<ssize_t>(text.size()));
      const auto use = [&](std::span<const PeerOffered> offers) {
        if (r == cannot_map) throw Error(ErrorCode::device, "device 0 cannot reach device 1");
        for (size_t member = 0; member < offers.size(); ++member) {
          CHECK_EQUAL(offers[member].get<uint64_t>(), member + 40);
          char read[16] = {};
          CHECK(::pread(offers[member].descriptor, read, sizeof read - 1, 0) > 0);
          mine.contents[member] = read;
        }
      };
      const auto check = [&, looks = 0]() mutable -> std::optional<uint32_t> {
        if (++looks < 3) return std::nullopt;
        if (r == sees_loss) throw Error(ErrorCode::device, "device 0 gets nothing");
        return uint32_t{1} << r;
      };
      PeerMeeting meeting(hosts[static_cast<size_t>(r)], membership, 77, std::move(bucket), use,
                          check);
      come_to_its_end(meeting);
      CHECK(meeting.silent().empty());
      mine.refusal = meeting.refusal();
      mine.notes = meeting.notes();
    });
  for (std::thread& thread : threads) thread.join();
  return found;
}

}  // namespace

TEST(peers_come_by_each_others_buckets) {
  for (const int size : {1, 2, 5})
    for (const Found& rank : meet(size, -1, -1)) {
      CHECK_EQUAL(rank.refusal, std::string());
      CHECK_EQUAL(rank.notes, (1U << size) - 1);
      for (size_t other = 0; other < rank.contents.size(); ++other)
        CHECK_EQUAL(rank.contents[other], "of " + std::to_string(other));
    }
}

TEST(peers_agree_on_who_has_no_bucket_or_cannot_map_one) {
  for (const Found& rank : meet(3, 1, -1))
    CHECK_EQUAL(rank.refusal, std::string("rank 1: no room"));
  for (const Found& rank : meet(3, -1, 2))
    CHECK_EQUAL(rank.refusal, std::string("rank 2: device 0 cannot reach device 1"));
  for (const Found& rank : meet(3, 2, 0)) CHECK_EQUAL(rank.refusal, std::string("rank 2: no room"));
  for (const Found& rank : meet(3, -1, -1, 1))
    CHECK_EQUAL(rank.refusal, std::string("rank 1: device 0 gets nothing"));
}

TEST(peers_part_when_all_have_told_so) {
  constexpr size_t kSize = 3, kArena = 1 << 20;
  const std::vector<Host> hosts = hosts_in_process(static_cast<int>(kSize), kArena);
  std::vector<std::optional<PeerParting>> all(kSize);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < kSize; ++r)
    threads.emplace_back([&, r] {
      Membership membership;
      membership.rank = static_cast<int>(r);
      membership.members = {0, 1, 2};
      PeerMeeting meeting(hosts[r], membership, 78, {}, [](auto) {}, [] { return uint32_t{0}; });
      come_to_its_end(meeting);
      all[r] = meeting.parting();
    });
  for (std::thread& thread : threads) thread.join();
  const auto nobody = [](int) { return false; };
  CHECK(!all[0]->has_begun(nobody) && !all[0]->is_over(nobody));
  all[1]->tell();
  CHECK(all[0]->has_begun(nobody) && !all[0]->is_over(nobody));
  CHECK(!all[1]->has_begun(nobody));
  all[2]->tell();
  CHECK(all[0]->is_over(nobody));
  CHECK(!all[2]->is_over(nobody) && !all[1]->is_over(nobody));
  CHECK(all[2]->is_over([](int member) { return member == 0; }));
  all[0]->tell();
  CHECK(all[1]->is_over(nobody));
}

TEST(members_hear_alike_why_they_have_no_nccl) {
  constexpr size_t kSize = 3, kArena = 8 << 20;
  const std::vector<Host> hosts = hosts_in_process(static_cast<int>(kSize), kArena);
  std::vector<PeerInfo> infos;
  for (const HostPeer& peer : hosts[0].peers) infos.push_back(peer.info);
  std::vector<std::string> refusals(kSize);
  std::vector<std::thread> threads;
  for (size_t r = 0; r < kSize; ++r)
    threads.emplace_back([&, r] {
      const int rank = static_cast<int>(r);
      Membership membership;
      membership.rank = rank;
      membership.members = {0, 1, 2};
      const std::shared_ptr<Transport> transport =
          shm_transport(std::make_shared<Arena>(hosts[r].segment, rank), rank, infos[r].host);
      NcclMeeting meeting(hosts[r], membership, connect_members({transport}, infos, 91), nullptr,
                          false);
      come_to_its_end(meeting);
      CHECK(meeting.silent().empty());
      refusals[r] = meeting.refusal();
    });
  for (std::thread& thread : threads) thread.join();
  for (const std::string& refusal : refusals)
    CHECK_EQUAL(refusal, std::string("rank 0: its device cannot be used"));
}
