// Properties that only MPI channels have: bounds, ends, and frames that no rank waits for. Those of
// all channels: test_channels.cpp.
#include "transport/mpi.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_mpi.h"
#include "transport/mpi_channel.h"
#include "transport/mpi_end.h"
#include "transport/mpi_frame.h"

using namespace farandole;
using testing::FakeMpi;
using testing::FakeMpiRank;

namespace {

constexpr uint64_t kMpiStream = 5;
constexpr Key kMpiSecret{std::byte{3}};

std::vector<std::byte> numbered(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 256);
  return bytes;
}

/// Two ranks of a world, in one thread.
struct TwoOverMpi {
  std::shared_ptr<FakeMpi> mpi = std::make_shared<FakeMpi>();
  std::shared_ptr<MpiPort> ports[2] = {port(0), port(1)};

  std::shared_ptr<MpiPort> port(int rank, uint64_t world = 77) const {
    return std::make_shared<MpiPort>(std::make_unique<FakeMpiRank>(mpi, rank), rank, 2, world,
                                     kMpiSecret);
  }
  MpiChannel channel(int rank, uint64_t stream = kMpiStream, int lane = 0) const {
    return {ports[rank], 1 - rank, stream, lane};
  }
};

/// Writes until the channel takes no more. Returns the bytes taken.
size_t fill(Channel& channel, std::span<const std::byte> bytes) {
  size_t taken = 0;
  while (const size_t more = channel.write(bytes.subspan(taken))) taken += more;
  return taken;
}

std::vector<std::byte> read_all(Channel& channel) {
  std::vector<std::byte> all;
  for (auto arrived = channel.peek(1); !arrived.empty(); arrived = channel.peek(1)) {
    all.insert(all.end(), arrived.begin(), arrived.end());
    channel.consume(arrived.size());
  }
  return all;
}

}  // namespace

TEST(mpi_is_ahead_of_its_consumer_by_a_window_at_most) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(3 * MpiPort::kWindow);
  size_t done = 0;
  for (int round = 0; done < bytes.size(); ++round) {
    CHECK(round < 1000);
    const size_t taken = fill(out, std::span(bytes).subspan(done));
    CHECK(taken <= MpiPort::kWindow);
    CHECK(!out.drained());
    const auto got = read_all(in);
    CHECK(std::ranges::equal(got, std::span(bytes).subspan(done, taken)));
    done += taken;
  }
  CHECK(out.drained());
}

TEST(mpi_takes_more_where_a_window_of_odd_length_was_full) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(2 * MpiPort::kWindow);
  size_t done = out.write(std::span(bytes).first(MpiPort::kPiece / 2 + 1));
  done += fill(out, std::span(bytes).subspan(done));
  CHECK(done < MpiPort::kWindow);  // the rest of it is not worth a message
  CHECK_EQUAL(read_all(in).size(), done);
  CHECK(out.write(std::span(bytes).subspan(done)) > 0);
}

TEST(mpi_is_drained_while_little_is_on_its_way) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(MpiPort::kQuiet + 1);
  CHECK_EQUAL(out.write(std::span(bytes).first(MpiPort::kQuiet)), MpiPort::kQuiet);
  CHECK(out.drained());
  CHECK_EQUAL(out.write(std::span(bytes).last(1)), 1U);
  CHECK(!out.drained());
  in.peek(1);
  CHECK(!out.drained());  // it has arrived, and is not consumed
  in.consume(MpiPort::kQuiet);
  CHECK(out.drained());
}

TEST(mpi_gives_elements_whole_that_arrive_in_parts) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(100);
  size_t done = 0;
  for (const size_t count : {5, 1, 1, 93}) {
    CHECK_EQUAL(out.write(std::span(bytes).subspan(done, count)), count);
    done += count;
  }
  done = 0;
  for (const size_t element : {8, 4, 16, 1}) {
    const auto arrived = in.peek(element);
    CHECK(arrived.size() >= element);
    CHECK(std::ranges::equal(arrived.first(element), std::span(bytes).subspan(done, element)));
    in.consume(element);
    done += element;
  }
  CHECK(in.peek(bytes.size() - done + 1).empty());
  CHECK(std::ranges::equal(read_all(in), std::span(bytes).subspan(done)));
}

TEST(mpi_keeps_what_comes_before_its_channel_is_open) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), other = two.channel(0, kMpiStream + 1);
  const auto bytes = numbered(10'000);
  CHECK_EQUAL(fill(out, bytes), bytes.size());
  MpiChannel elsewhere = two.channel(1, kMpiStream + 1);
  CHECK(elsewhere.peek(1).empty());  // and receives all that has arrived
  MpiChannel in = two.channel(1);
  CHECK(read_all(in) == bytes);
}

TEST(mpi_drops_what_comes_for_a_channel_that_was_shut) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), other = two.channel(0, kMpiStream + 1);
  {
    MpiChannel in = two.channel(1);
  }
  const auto bytes = numbered(10'000);
  fill(out, bytes);
  CHECK_EQUAL(fill(other, bytes), bytes.size());
  MpiChannel in = two.channel(1, kMpiStream + 1);
  CHECK(read_all(in) == bytes);
  CHECK(two.channel(1).peek(1).empty());
}

TEST(mpi_drops_what_a_world_before_this_one_has_sent) {
  TwoOverMpi two;
  const auto bytes = numbered(1000);
  {
    two.channel(0).write(bytes);
  }
  two.ports[0] = two.port(0, 78);
  two.ports[1] = two.port(1, 78);
  MpiChannel out = two.channel(0), in = two.channel(1);
  CHECK(in.peek(1).empty());
  out.write(std::span(bytes).first(10));
  CHECK(std::ranges::equal(read_all(in), std::span(bytes).first(10)));
}

TEST(mpi_refuses_messages_that_are_none_of_its_own) {
  const TwoOverMpi two;
  FakeMpiRank stranger(two.mpi, 0);
  const auto bytes = numbered(100);
  stranger.send(std::span(bytes).first(3), 1);
  MpiChannel in = two.channel(1);
  CHECK(in.peek(1).empty());  // for a second: the error may have a better explanation
  std::this_thread::sleep_for(std::chrono::milliseconds(1010));
  CHECK_THROWS(in.peek(1), Error,
               e.code() == ErrorCode::link && e.verdict().find("rank 0") != std::string::npos);
}

TEST(mpi_is_called_no_more_once_a_rank_has_died) {
  const TwoOverMpi two;
  const auto transport = mpi_transport(two.ports[0]);
  CHECK(!transport->has_to_be_asked());
  auto channels =
      transport->connect({.rank = 1, .host = "there", .address = {}}, 9, 1)->poll(now());
  CHECK(transport->has_to_be_asked());
  const auto bytes = numbered(100);
  CHECK_EQUAL(channels[0]->write(bytes), 100U);
  transport->lose(1);
  two.mpi->broken = true;  // a call would be an error at once
  CHECK(!transport->has_to_be_asked());
  CHECK_EQUAL(channels[0]->write(bytes), 0U);
  CHECK(channels[0]->peek(1).empty());
  std::this_thread::sleep_for(std::chrono::milliseconds(1010));
  CHECK_THROWS(channels[0]->write(bytes), Error,
               e.verdict().find("rank 1 has died") != std::string::npos);
  transport->leave();
  channels.clear();
}

TEST(mpi_that_returns_an_error_is_used_no_more) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0);
  two.mpi->broken = true;
  const auto bytes = numbered(100);
  CHECK_EQUAL(out.write(bytes), 0U);
  two.mpi->broken = false;
  CHECK_EQUAL(out.write(bytes), 0U);
  CHECK(two.mpi->pipes.empty());
}

TEST(mpi_that_is_finalized_too_early_is_an_error_at_once) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(100);
  CHECK(in.peek(1).empty());
  two.ports[1]->finalize();
  for (const auto& [ends, pipe] : two.mpi->pipes) CHECK(pipe.posted.empty());
  CHECK_THROWS(in.peek(1), Error, e.verdict().find("MPI_Finalize") != std::string::npos);
  CHECK_THROWS(in.write(bytes), Error, e.code() == ErrorCode::link);
}

TEST(mpi_leaves_with_all_sent_and_no_receive_posted) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(20'000);  // it is complete only when it is received
  CHECK_EQUAL(fill(out, bytes), bytes.size());
  std::thread other([&] {
    while (in.peek(1).empty()) std::this_thread::yield();
  });
  two.ports[0]->close();
  other.join();
  two.ports[1]->close();
  for (const auto& [ends, pipe] : two.mpi->pipes) {
    CHECK(pipe.posted.empty());
    CHECK(pipe.sent.empty());
  }
  CHECK_EQUAL(out.write(bytes), 0U);
  CHECK(std::ranges::equal(in.peek(1), bytes));
}

// ---- long transfers ----

namespace {

constexpr size_t kManyBytes = 2 * MpiPort::kFolded + 1000;

/// The number of posted receives into `memory`.
size_t posted_in(const FakeMpi& mpi, std::span<const std::byte> memory) {
  size_t count = 0;
  for (const auto& [ends, pipe] : mpi.pipes)
    for (const auto& posted : pipe.posted)
      count += posted->into.data() >= memory.data() &&
               posted->into.data() < memory.data() + memory.size();
  return count;
}

/// Calls let_go() on both ends until neither holds memory for now, or `most` has passed.
std::pair<Held, Held> let_go(Channel& one, Channel& other, Duration most) {
  std::pair<Held, Held> held{one.let_go(), other.let_go()};
  const Deadline until = Deadline::after(most);
  while ((held.first == Held::for_now || held.second == Held::for_now) && !until.passed(now()))
    held = {one.let_go(), other.let_go()};
  return held;
}

}  // namespace

TEST(mpi_sends_memory_straight_to_its_place) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(kManyBytes);
  std::vector<std::byte> place(kManyBytes);
  for (int round = 0; round < 3; ++round) {
    std::ranges::fill(place, std::byte{0});
    CHECK(!out.place_for(bytes));  // not offered
    in.offer(place.data(), kManyBytes);
    CHECK_EQUAL(posted_in(*two.mpi, place), 1U);
    CHECK(out.place_for(bytes)->empty());
    CHECK_EQUAL(out.write(bytes), kManyBytes);
    CHECK(std::ranges::equal(place, bytes));  // though the receiver has not polled
    CHECK(in.peek(1).data() == place.data());
    for (size_t done = 0; done < kManyBytes;)
      done += in.read(std::span(place).subspan(done, std::min<size_t>(5000, kManyBytes - done)));
    CHECK(std::ranges::equal(place, bytes));
    CHECK(!out.refers());
    CHECK(out.drained());
  }
}

TEST(mpi_sends_nothing_in_frames_of_what_will_have_a_place) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(kManyBytes);
  in.offer(nullptr, kManyBytes);
  CHECK(out.place_for(bytes)->empty());
  CHECK_EQUAL(out.write(bytes), 2 * MpiPort::kFolded);  // as much as there are buffers for
  CHECK_EQUAL(out.write(std::span(bytes).last(1000)), 0U);
  in.consume(in.peek(1).size());
  in.peek(1);
  CHECK_EQUAL(out.write(std::span(bytes).last(1000)), 1000U);
}

TEST(mpi_folds_from_few_buffers) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(5 * MpiPort::kFolded + 24);
  in.offer(nullptr, bytes.size());
  std::vector<std::byte> got;
  size_t sent = 0;
  for (int round = 0; got.size() < bytes.size(); ++round) {
    CHECK(round < 1000);
    if (sent < bytes.size() && out.place_for(std::span(bytes).subspan(sent)))
      sent += out.write(std::span(bytes).subspan(sent));
    CHECK(sent <= got.size() + 2 * MpiPort::kFolded);
    const auto arrived = in.peek(8);
    CHECK(arrived.size() % 8 == 0);
    got.insert(got.end(), arrived.begin(), arrived.end());
    in.consume(arrived.size());
  }
  CHECK(got == bytes);
}

TEST(mpi_sends_no_little_of_what_will_be_ready_soon) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(kManyBytes);
  std::vector<std::byte> place(kManyBytes);
  in.offer(place.data(), kManyBytes);
  CHECK(!out.place_for(std::span(bytes).first(1000)));
  CHECK(out.place_for(std::span(bytes).first(MpiPort::kFolded)));
  CHECK_EQUAL(out.write(std::span(bytes).first(kManyBytes - 1000)), kManyBytes - 1000);
  CHECK(out.place_for(std::span(bytes).last(1000)));  // the rest of it
  CHECK(in.peek(1).empty());
  CHECK_EQUAL(out.write(std::span(bytes).last(1000)), 1000U);
  CHECK(std::ranges::equal(in.peek(1), bytes));
}

TEST(mpi_keeps_what_comes_in_frames_behind_what_has_a_place) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(kManyBytes + 100);
  std::vector<std::byte> place(kManyBytes);
  in.offer(place.data(), kManyBytes);
  CHECK(out.place_for(bytes));
  CHECK_EQUAL(out.write(std::span(bytes).first(kManyBytes)), kManyBytes);
  CHECK_EQUAL(out.write(std::span(bytes).last(100)), 100U);
  MpiChannel other = two.channel(1, kMpiStream + 1);
  CHECK(other.peek(1).empty());  // and takes the frame
  CHECK(read_all(in) == bytes);
}

TEST(mpi_takes_no_frame_whose_head_was_changed_repeated_or_left_out) {
  using Sent = std::deque<std::shared_ptr<FakeMpi::Message>>;
  const auto is_taken = [](const std::function<void(Sent&)>& act) {
    const TwoOverMpi two;
    MpiChannel out = two.channel(0), in = two.channel(1);
    for (int i = 0; i < 2; ++i) out.write(numbered(100));
    act(two.mpi->pipes[{0, 1, kMpiFrames}].sent);
    in.peek(200);
    return two.ports[1]->expects();  // false once MPI is no longer used
  };
  CHECK(is_taken([](Sent&) {}));
  for (size_t at = 0; at < kMpiHead; ++at) {
    const testing::Note note("byte ", at);
    CHECK(!is_taken([&](Sent& sent) { sent[0]->copy[at] ^= std::byte{1}; }));
  }
  CHECK(!is_taken([](Sent& sent) { sent.pop_front(); }));
  CHECK(!is_taken([](Sent& sent) { std::ranges::copy(sent[0]->copy, sent[1]->copy.begin()); }));
}

TEST(mpi_lets_go_of_memory_at_once_where_both_ends_have_failed) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(kManyBytes);
  std::vector<std::byte> place(kManyBytes);
  in.offer(place.data(), kManyBytes);
  const auto held = let_go(out, in, std::chrono::milliseconds(200));
  CHECK(held == std::pair(Held::no, Held::no));
  CHECK_EQUAL(posted_in(*two.mpi, place), 0U);
  // In the middle of a transfer.
  MpiChannel more = two.channel(0, kMpiStream + 1), into = two.channel(1, kMpiStream + 1);
  into.offer(nullptr, kManyBytes);
  CHECK(more.place_for(bytes));
  CHECK(more.write(bytes) > 0);
  CHECK(let_go(more, into, std::chrono::milliseconds(200)) == std::pair(Held::no, Held::no));
  // The sender lets go before the receiver offers its memory.
  MpiChannel late = two.channel(0, kMpiStream + 2), early = two.channel(1, kMpiStream + 2);
  CHECK(late.let_go() == Held::no);
  early.offer(place.data(), kManyBytes);
  CHECK(let_go(late, early, std::chrono::milliseconds(200)) == std::pair(Held::no, Held::no));
}

TEST(mpi_leaves_nothing_on_its_way_to_a_place_that_was_begun) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(kManyBytes);
  std::vector<std::byte> place(kManyBytes);
  in.offer(place.data(), kManyBytes);
  CHECK(out.place_for(bytes));
  CHECK_EQUAL(out.write(std::span(bytes).first(kManyBytes - 1000)), kManyBytes - 1000);
  CHECK(in.let_go() == Held::for_now);  // the rest has not come
  const auto held = let_go(out, in, std::chrono::milliseconds(200));
  CHECK(held == std::pair(Held::no, Held::no));
  for (const auto& [ends, pipe] : two.mpi->pipes)
    if (std::get<2>(ends) >= kMpiFirstPlace) CHECK(pipe.sent.empty() && pipe.posted.empty());
}

TEST(mpi_answers_a_place_for_a_channel_that_was_shut) {
  const TwoOverMpi two;
  MpiChannel other = two.channel(0, kMpiStream + 1), in = two.channel(1);
  {
    MpiChannel out = two.channel(0);
  }
  std::vector<std::byte> place(kManyBytes);
  in.offer(place.data(), kManyBytes);
  CHECK(other.peek(1).empty());  // takes it
  CHECK(in.let_go() == Held::no);
}

TEST(mpi_cancels_a_receive_that_gets_no_answer_and_never_uses_its_tag_again) {
  const TwoOverMpi two;
  std::vector<std::byte> place(kManyBytes);
  int tag = 0;
  {
    MpiChannel in = two.channel(1);
    in.offer(place.data(), kManyBytes);
    for (const auto& [ends, pipe] : two.mpi->pipes)
      if (!pipe.posted.empty()) tag = std::max(tag, std::get<2>(ends));
    CHECK(in.let_go() == Held::for_now);
    std::this_thread::sleep_for(std::chrono::milliseconds(260));
    in.let_go();
    CHECK(in.let_go() == Held::no);
  }
  CHECK_EQUAL(posted_in(*two.mpi, place), 0U);
  const auto stray = numbered(100);
  FakeMpiRank stranger(two.mpi, 0);
  CHECK(tag >= kMpiFirstPlace);
  stranger.send(stray, 1, tag);  // late
  const auto later = two.port(1, 78);
  MpiChannel in(later, 0, kMpiStream, 0);
  in.offer(place.data(), kManyBytes);
  CHECK(in.peek(1).empty());
  CHECK(std::ranges::all_of(place, [](std::byte b) { return b == std::byte{0}; }));
}

TEST(mpi_that_may_still_read_memory_is_called_no_more) {
  const TwoOverMpi two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(MpiPort::kFolded);
  in.offer(nullptr, bytes.size());
  for (auto& [ends, pipe] : two.mpi->pipes)
    if (std::get<2>(ends) >= kMpiFirstPlace) pipe.posted.clear();  // as of a rank that is stopped
  CHECK(out.place_for(bytes));
  CHECK_EQUAL(out.write(bytes), bytes.size());
  CHECK(out.refers());
  CHECK(out.let_go() == Held::for_now);
  std::this_thread::sleep_for(MpiPort::kLongestHold + std::chrono::milliseconds(10));
  CHECK(out.let_go() == Held::for_ever);
  CHECK(has_memory_with_mpi());
  two.mpi->broken = true;
  CHECK_EQUAL(out.write(bytes), 0U);
}

TEST(mpi_that_ends_with_a_death_keeps_the_memory_that_it_may_use) {
  const TwoOverMpi two;
  const auto transport = mpi_transport(two.ports[1]);
  MpiChannel in = two.channel(1), idle = two.channel(1, kMpiStream + 1);
  std::vector<std::byte> place(kManyBytes);
  in.offer(place.data(), kManyBytes);
  transport->lose(0);
  two.mpi->broken = true;  // a call would be an error at once
  CHECK(in.let_go() == Held::for_ever);
  CHECK(idle.let_go() == Held::no);
}
