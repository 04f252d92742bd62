// What channels over MPI are besides channels (those: test_channels.cpp): bounds, ends, and frames
// that nobody waits for.
#include "transport/mpi.h"

#include <algorithm>
#include <string>
#include <thread>
#include <vector>

#include "check.h"
#include "fake_mpi.h"
#include "transport/mpi_channel.h"

using namespace farandole;
using testing::FakeMpi;
using testing::FakeMpiRank;

namespace {

constexpr uint64_t kStream = 5;

std::vector<std::byte> numbered(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 31 + i / 256);
  return bytes;
}

/// Two ranks of a world, in one thread.
struct Two {
  std::shared_ptr<FakeMpi> mpi = std::make_shared<FakeMpi>();
  std::shared_ptr<MpiPort> ports[2] = {port(0), port(1)};

  std::shared_ptr<MpiPort> port(int rank, uint64_t world = 77) const {
    return std::make_shared<MpiPort>(std::make_unique<FakeMpiRank>(mpi, rank), rank, 2, world);
  }
  MpiChannel channel(int rank, uint64_t stream = kStream, int lane = 0) const {
    return {ports[rank], 1 - rank, stream, lane};
  }
};

/// As much as the channel takes.
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
  const Two two;
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
  const Two two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(2 * MpiPort::kWindow);
  size_t done = out.write(std::span(bytes).first(MpiPort::kPiece / 2 + 1));
  done += fill(out, std::span(bytes).subspan(done));
  CHECK(done < MpiPort::kWindow);  // the rest of it is not worth a message
  CHECK_EQUAL(read_all(in).size(), done);
  CHECK(out.write(std::span(bytes).subspan(done)) > 0);
}

TEST(mpi_is_drained_while_little_is_on_its_way) {
  const Two two;
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
  const Two two;
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
  const Two two;
  MpiChannel out = two.channel(0), other = two.channel(0, kStream + 1);
  const auto bytes = numbered(10'000);
  CHECK_EQUAL(fill(out, bytes), bytes.size());
  MpiChannel elsewhere = two.channel(1, kStream + 1);
  CHECK(elsewhere.peek(1).empty());  // and takes what is there
  MpiChannel in = two.channel(1);
  CHECK(read_all(in) == bytes);
}

TEST(mpi_drops_what_comes_for_a_channel_that_was_shut) {
  const Two two;
  MpiChannel out = two.channel(0), other = two.channel(0, kStream + 1);
  {
    MpiChannel in = two.channel(1);
  }
  const auto bytes = numbered(10'000);
  fill(out, bytes);
  CHECK_EQUAL(fill(other, bytes), bytes.size());
  MpiChannel in = two.channel(1, kStream + 1);
  CHECK(read_all(in) == bytes);
  CHECK(two.channel(1).peek(1).empty());
}

TEST(mpi_drops_what_a_world_before_this_one_has_sent) {
  Two two;
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
  const Two two;
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
  const Two two;
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
  const Two two;
  MpiChannel out = two.channel(0);
  two.mpi->broken = true;
  const auto bytes = numbered(100);
  CHECK_EQUAL(out.write(bytes), 0U);
  two.mpi->broken = false;
  CHECK_EQUAL(out.write(bytes), 0U);
  CHECK(two.mpi->pipes.empty());
}

TEST(mpi_that_is_finalized_too_early_is_an_error_at_once) {
  const Two two;
  MpiChannel out = two.channel(0), in = two.channel(1);
  const auto bytes = numbered(100);
  CHECK(in.peek(1).empty());
  two.ports[1]->finalize();
  for (const auto& [ends, pipe] : two.mpi->pipes) CHECK(pipe.posted.empty());
  CHECK_THROWS(in.peek(1), Error, e.verdict().find("MPI_Finalize") != std::string::npos);
  CHECK_THROWS(in.write(bytes), Error, e.code() == ErrorCode::link);
}

TEST(mpi_leaves_with_all_sent_and_no_receive_posted) {
  const Two two;
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
