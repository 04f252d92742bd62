// Exchanges in streams over the fake driver, by ranks that are threads: who waits for whom, what
// ends when nobody comes; and how ranks come by each other's buckets.
#include <fcntl.h>
#include <sys/mman.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <deque>
#include <thread>
#include <vector>

#include "base/dtype.h"
#include "control/host.h"
#include "cuda/library/exchange.h"
#include "devices/peers.h"
#include "fake.h"
#include "fold/fold.h"

using namespace farandole;
using namespace farandole::cuda;
using testing::contains;
using testing::fake;
using testing::FreshDriver;

namespace {

constexpr char kImage[] = "fake image";
constexpr size_t kCount = 1500;
constexpr size_t kBytes = kCount * sizeof(float);

/// One rank: its end, an array, and a stream of its owner.
struct Member {
  std::shared_ptr<const DeviceContext> context;
  std::unique_ptr<DeviceMemory> array;
  PinnedMemory contents;
  DeviceStream owner;
  Exchange exchange;  // ends first: what it has under way uses the rest
  std::vector<std::unique_ptr<Moments>> moments;
  uint32_t newest = 0;

  Member(const std::shared_ptr<const DeviceContext>& of, int rank, int size, int doorbell)
      : context(of),
        array(allocate_device(of, kBytes, Sharing::none)),
        contents(of, kBytes),
        owner(of),
        exchange(of, {.device = 0,
                      .rank = rank,
                      .size = size,
                      .doorbell = doorbell,
                      .spins = 1,
                      .bucket_bytes = kBytes}) {}

  float* values() { return reinterpret_cast<float*>(contents.host()); }

  void put(float value) {
    for (size_t i = 0; i < kCount; ++i) values()[i] = value + static_cast<float>(i);
    owner.copy(array->address(), contents.address(), kBytes);
  }
  void get() {
    exchange.complete_before(*moments.back(), owner.handle());
    owner.copy(contents.address(), array->address(), kBytes);
  }

  /// An all-reduce in place, in two pieces.
  void launch(int rank, int size) {
    moments.push_back(exchange.moments(owner));
    exchange.begin(*moments.back(), 2);
    for (const size_t half : {size_t{0}, size_t{1}}) {
      const size_t part = kCount / 2, mine = part / static_cast<size_t>(size);
      const CudaMove in{half * part * 4, 0, part * 4, rank},
          out{0, half * part * 4, part * 4, rank};
      CudaPiece piece{.strand = static_cast<int32_t>(half),
                      .input = array->address(),
                      .output = array->address(),
                      .in = &in,
                      .out = &out,
                      .ins = 1,
                      .outs = 1,
                      .first = static_cast<size_t>(rank) * mine,
                      .count = rank + 1 < size ? mine : part - static_cast<size_t>(rank) * mine,
                      .dtype = static_cast<int32_t>(DType::float32),
                      .op = static_cast<int32_t>(ReduceOp::sum),
                      .folds_to = kFoldsToAllBuckets,
                      .fold_to = 0,
                      .leaf_factor = 1,
                      .finish_factor = 0.5,
                      .leaf_divide = 1,
                      .finish_divide = 1};
      exchange.run(piece);
    }
    newest = exchange.end(*moments.back());
  }
};

struct Ranks {
  FreshDriver fresh;
  Fd doorbell = make_event_fd();
  std::shared_ptr<const DeviceContext> context;
  std::deque<Member> all;

  explicit Ranks(int size) : context(fresh.context()) {
    for (int r = 0; r < size; ++r) {
      all.emplace_back(context, r, size, doorbell.get());
      all.back().exchange.open_bucket(kImage);
    }
    for (int r = 0; r < size; ++r)
      for (int other = 0; other < size; ++other)
        if (r != other)
          all[static_cast<size_t>(r)].exchange.map(
              static_cast<uint32_t>(other), all[static_cast<size_t>(other)].exchange.share(), 4);
  }
  ~Ranks() {
    for (Member& member : all)
      for (auto& moments : member.moments) member.exchange.give_back(std::move(moments));
    all.clear();
    context.reset();
  }
  Ranks(const Ranks&) = delete;
  Ranks& operator=(const Ranks&) = delete;
};

}  // namespace

TEST(step_exchange_orders_ranks_by_flags_alone) {
  for (const char* seed : {"1", "2", "3"}) {
    constexpr int kSize = 3;
    Ranks ranks(kSize);
    fake().configure("jitter", seed);
    std::vector<std::thread> threads;
    for (int r = 0; r < kSize; ++r)
      threads.emplace_back([&, r] {
        Member& me = ranks.all[static_cast<size_t>(r)];
        for (int round = 0; round < 3; ++round) {
          const testing::Note note("seed ", seed, ", rank ", r, ", round ", round);
          me.put(static_cast<float>(8 * r + round));
          me.launch(r, kSize);
          me.launch(r, kSize);  // of what the one before has left
          me.get();
          me.owner.synchronize();
          CHECK(me.exchange.is_complete(me.newest) || !me.exchange.is_idle());
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

TEST(step_exchange_leaves_no_stream_waiting_for_a_rank_that_does_not_come) {
  // What drains is read while it may still be written: by design, since nobody uses it any more.
  if (testing::kThreadSanitizer) return;
  Ranks ranks(2);
  Member &here = ranks.all[0], &late = ranks.all[1];
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
  Ranks ranks(2);
  ranks.all[0].put(1);
  ranks.all[0].launch(0, 2);
}

TEST(ranks_that_share_a_device_let_its_streams_wait) {
  const FreshDriver fresh;
  fake().configure("memory_operations", "0");
  const Fd doorbell = make_event_fd();
  std::deque<Member> all;
  for (int r = 0; r < 2; ++r) {
    all.emplace_back(fresh.context(), r, 2, doorbell.get());
    all.back().exchange.open_bucket(kImage);
  }
  CHECK_THROWS(all[0].exchange.map(1, all[1].exchange.share(), 4), Error,
               e.code() == ErrorCode::device &&
                   contains(e.verdict(), "device 0 (Fake GPU) cannot let streams wait for words"));
}

// ---- buckets by descriptor ----

namespace {

struct Found {
  std::string refusal;
  std::vector<std::string> contents;
};

/// What each rank maps is a file with its owner's number.
std::vector<Found> meet(int size, int refuses, int cannot_map) {
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
      int looks = 0;
      const auto use = [&](std::span<const PeerOffered> offers) {
        if (r == cannot_map) throw Error(ErrorCode::device, "device 0 cannot reach device 1");
        if (cannot_map >= 0 || ++looks < 3) return false;  // it takes a while, or for ever
        for (size_t member = 0; member < offers.size(); ++member) {
          CHECK_EQUAL(offers[member].get<uint64_t>(), member + 40);
          char read[16] = {};
          CHECK(::pread(offers[member].descriptor, read, sizeof read - 1, 0) > 0);
          mine.contents[member] = read;
        }
        return true;
      };
      PeerMeeting meeting(hosts[static_cast<size_t>(r)], membership, 77, std::move(bucket), use);
      const Deadline patience = Deadline::after(std::chrono::seconds(60));
      do {
        meeting.poll();
        std::this_thread::yield();
      } while (!meeting.done() && !patience.passed(now()));
      CHECK(meeting.silent().empty());
      mine.refusal = meeting.refusal();
    });
  for (std::thread& thread : threads) thread.join();
  return found;
}

}  // namespace

TEST(peers_come_by_each_others_buckets) {
  for (const int size : {1, 2, 5})
    for (const Found& rank : meet(size, -1, -1)) {
      CHECK_EQUAL(rank.refusal, std::string());
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
      PeerMeeting meeting(hosts[r], membership, 78, {}, [](auto) { return true; });
      const Deadline patience = Deadline::after(std::chrono::seconds(60));
      do {
        meeting.poll();
        std::this_thread::yield();
      } while (!meeting.done() && !patience.passed(now()));
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
