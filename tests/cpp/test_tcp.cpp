// Properties that only TCP connections have: authentication, wake-ups of a parked rank, and ends.
// Those of all channels: test_channels.cpp.
#include <dirent.h>
#include <poll.h>
#include <sys/socket.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <functional>
#include <string>
#include <vector>

#include "base/error.h"
#include "base/seal.h"
#include "check.h"
#include "transport/tcp.h"
#include "transport/tcp_address.h"
#include "transport/tcp_door.h"
#include "world.h"

using namespace farandole;
using testing::World;

namespace {

constexpr uint64_t kTcpStream = 77;

std::vector<std::byte> pattern(size_t count) {
  std::vector<std::byte> bytes(count);
  for (size_t i = 0; i < count; ++i) bytes[i] = static_cast<std::byte>(i * 7);
  return bytes;
}

/// Waits until `holds` is true; a timeout is a failed check.
template <typename Holds>
void wait_until(Holds holds) {
  const Deadline patience = Deadline::after(std::chrono::seconds(60));
  while (!holds()) {
    if (patience.passed(now())) {
      testing::fail(__FILE__, __LINE__, "it does not come to pass");
      return;
    }
    std::this_thread::yield();
  }
}

size_t open_descriptors() {
  DIR* folder = ::opendir("/proc/self/fd");
  size_t count = 0;
  while (::readdir(folder) != nullptr) ++count;
  ::closedir(folder);
  return count;
}

bool is_readable(int fd) {
  pollfd p{fd, POLLIN, 0};
  return ::poll(&p, 1, 0) > 0;
}

/// Two ranks and a channel between them.
struct TwoOverTcp {
  explicit TwoOverTcp(const MayHaveGone& may_have_gone = {}) {
    const auto segment = world.arena(0)->segment();
    for (int rank : {0, 1}) {
      transports[rank] = tcp_transport(segment, rank, "here", may_have_gone);
      const auto connecting =
          transports[rank]->connect(world.members()[static_cast<size_t>(1 - rank)], kTcpStream, 1);
      ends[rank] = std::move(connecting->poll(now())[0]);
    }
  }
  void send(int from, std::span<const std::byte> bytes) {
    wait_until([&] {
      bytes = bytes.subspan(ends[from]->write(bytes));
      return bytes.empty();
    });
  }
  std::vector<std::byte> receive(int at, size_t count) {
    std::vector<std::byte> got(count);
    size_t have = 0;
    wait_until([&] {
      have += ends[at]->read(std::span(got).subspan(have));
      return have == count;
    });
    return got;
  }
  int wake_fd(int rank) const { return transports[rank]->wake_fds()[0]; }
  TcpAddress address(int rank) const {
    return *TcpAddress::from(world.arena(0)->segment()->address_of(rank));
  }

  World world{2};
  std::unique_ptr<Transport> transports[2];
  std::unique_ptr<Channel> ends[2];
};

/// A client that has connected and has proved nothing.
struct Stranger {
  explicit Stranger(const TcpAddress& address) : socket(begin_to_connect(address)) {}
  void say(std::span<const std::byte> bytes) const {
    wait_until([&] {
      const ssize_t sent = ::send(socket.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
      return bytes.empty() || (sent < 0 && errno != EAGAIN);
    });
  }
  std::vector<std::byte> hear(size_t count) const {
    std::vector<std::byte> heard(count);
    size_t have = 0;
    wait_until([&] {
      const ssize_t got = ::recv(socket.get(), heard.data() + have, count - have, 0);
      if (got > 0) have += static_cast<size_t>(got);
      return have == count || got == 0;
    });
    return heard;
  }
  /// The number of bytes that it receives before the other end closes.
  size_t told() const {
    size_t bytes = 0;
    wait_until([&] {
      std::byte some[512];
      const ssize_t got = ::recv(socket.get(), some, sizeof some, 0);
      if (got > 0) bytes += static_cast<size_t>(got);
      return got == 0 || (got < 0 && errno != EAGAIN);
    });
    return bytes;
  }
  Fd socket;
};

}  // namespace

TEST(tcp_addresses_are_loopback_of_either_family) {
  for (const int family : {4, 6}) {
    const testing::Note note("family ", family);
    Fd listener;
    try {
      listener = listen_on_loopback(family);
    } catch (const Error&) {
      CHECK_EQUAL(family, 6);  // a host may have no IPv6
      continue;
    }
    const TcpAddress address = TcpAddress::of_listener(listener.get());
    CHECK_EQUAL(address.text().substr(0, family == 4 ? 10 : 6),
                family == 4 ? "127.0.0.1:" : "[::1]:");
    const auto again = TcpAddress::from(address.bytes());
    CHECK(again && again->bytes() == address.bytes());
    CHECK(begin_to_connect(*again));
  }
}

TEST(tcp_addresses_where_nobody_listens_are_refused) {
  const TcpAddress::Bytes good = [] {
    const Fd listener = listen_on_loopback(4);
    return TcpAddress::of_listener(listener.get()).bytes();
  }();
  CHECK(TcpAddress::from(good));
  CHECK(!TcpAddress::from(std::span(good).first(19)));
  CHECK(!TcpAddress::from({}));
  const auto changed = [&](size_t at, int to) {
    TcpAddress::Bytes bytes = good;
    bytes[at] = static_cast<std::byte>(to);
    return TcpAddress::from(bytes);
  };
  CHECK(!changed(0, 5));   // of no family
  CHECK(!changed(1, 1));   // what is 0 by the layout
  CHECK(changed(4, 10));   // 10.0.0.1
  CHECK(!changed(19, 1));  // behind the address
  TcpAddress::Bytes portless = good;
  portless[2] = portless[3] = std::byte{0};
  CHECK(!TcpAddress::from(portless));
  TcpAddress::Bytes everywhere = good;
  everywhere[4] = everywhere[7] = std::byte{0};
  CHECK(!TcpAddress::from(everywhere));
}

TEST(tcp_opens_no_lane_that_nobody_uses) {
  const World world(2);
  const auto segment = world.arena(0)->segment();
  const auto left = tcp_transport(segment, 0, "here"), right = tcp_transport(segment, 1, "here");
  const size_t before = open_descriptors();
  const auto a = left->connect(world.members()[1], kTcpStream, 4)->poll(now());
  const auto b = right->connect(world.members()[0], kTcpStream, 4)->poll(now());
  CHECK_EQUAL(a.size(), 4U);
  CHECK_EQUAL(open_descriptors(), before);
  const auto word = pattern(8);
  wait_until([&] { return a[2]->write(word) == 8; });
  wait_until([&] { return b[2]->peek(8).size() == 8; });
  CHECK_EQUAL(open_descriptors(), before + 2);
}

TEST(tcp_keeps_a_connection_that_comes_before_it_is_asked_for) {
  const World world(2);
  const auto segment = world.arena(0)->segment();
  const auto left = tcp_transport(segment, 0, "here"), right = tcp_transport(segment, 1, "here");
  const auto sender = std::move(left->connect(world.members()[1], kTcpStream, 1)->poll(now())[0]);
  const auto word = pattern(100);
  wait_until([&] { return sender->write(word) == word.size(); });
  const auto receiver =
      std::move(right->connect(world.members()[0], kTcpStream, 1)->poll(now())[0]);
  std::span<const std::byte> arrived;
  wait_until([&] { return (arrived = receiver->peek(1)).size() == word.size(); });
  CHECK(std::ranges::equal(arrived, word));
}

TEST(tcp_waits_for_a_rank_that_comes_later) {
  const World world(2);
  const auto segment = world.arena(0)->segment();
  const auto left = tcp_transport(segment, 0, "here");
  const auto sender = std::move(left->connect(world.members()[1], kTcpStream, 1)->poll(now())[0]);
  const auto word = pattern(8);
  CHECK_EQUAL(sender->write(word), 0U);
  const auto right = tcp_transport(segment, 1, "here");
  wait_until([&] { return sender->write(word) == 8; });
}

TEST(tcp_strangers_hold_up_nobody) {
  TwoOverTcp two;
  std::vector<Stranger> silent;
  for (size_t i = 0; i < TcpDoor::kMostHalfOpen + 20; ++i) silent.emplace_back(two.address(1));
  const auto word = pattern(1000);
  two.send(0, word);
  CHECK(two.receive(1, word.size()) == word);
}

TEST(tcp_drops_who_talks_garbage_and_says_nothing_of_itself) {
  TwoOverTcp two;
  for (const std::string_view text :
       {std::string_view("GET / HTTP/1.1\r\nHost: localhost\r\nUser-Agent: a program that looks "
                         "for servers\r\nAccept: */*\r\n\r\n"),
        std::string_view("\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03 a hello of TLS, and so much "
                         "more that it would fill a hello of ours")}) {
    const Stranger stranger(two.address(1));
    stranger.say(std::as_bytes(std::span(text)));
    CHECK_EQUAL(stranger.told(), 0U);
  }
}

TEST(tcp_drops_who_knows_the_layout_and_not_the_secret) {
  TwoOverTcp two;
  std::array<std::byte, 32> guess{};
  TcpHandshake handshake = TcpHandshake::dial({0, 1, kTcpStream, 0}, guess);
  const auto hello = handshake.to_send();
  const Stranger stranger(two.address(1));
  stranger.say(hello);
  const std::vector<std::byte> proof(32);
  stranger.say(proof);
  CHECK_EQUAL(stranger.told(), TcpHandshake::kMostRead);  // the listener's hello and its proof
  const auto word = pattern(64);
  two.send(0, word);
  CHECK(two.receive(1, word.size()) == word);
}

/// The dialer's proof, by the layouts of tcp_handshake.h.
Digest dialers_proof(std::span<const std::byte, 32> secret, std::span<const std::byte> hellos) {
  constexpr std::string_view kWhose = "farandole tcp, dialer";
  std::array<std::byte, 24> whose{};
  std::ranges::copy(std::as_bytes(std::span(kWhose)), whose.begin());
  return hmac_sha256(secret, {whose, hellos});
}

TEST(tcp_listener_believes_a_rank_of_its_own_that_differs_and_nobody_else) {
  for (const bool knows_the_secret : {false, true}) {
    const testing::Note note("knows the secret ", knows_the_secret);
    const World world(2);
    const auto segment = world.arena(0)->segment();
    TcpDoor door(segment, 1);
    const TcpLane lane{0, 1, kTcpStream, 0};
    TcpHandshake handshake = TcpHandshake::dial(lane, segment->secret());
    std::vector<std::byte> hellos(handshake.to_send().begin(), handshake.to_send().end());
    hellos[16] ^= std::byte{1};  // another layout of messages
    const Stranger dialer(*TcpAddress::from(segment->address_of(1)));
    dialer.say(hellos);
    const std::vector<std::byte> answer = dialer.hear(TcpHandshake::kMostRead);
    hellos.insert(hellos.end(), answer.begin(), answer.begin() + TcpHello::kBytes);
    Digest proof = dialers_proof(segment->secret(), hellos);
    if (!knows_the_secret) proof[0] ^= std::byte{1};
    dialer.say(proof);
    CHECK_EQUAL(dialer.told(), 0U);         // it is hung up on
    const auto arrival = door.await(lane);  // which may come before or after the verdict
    if (!knows_the_secret) {
      CHECK(!arrival->here.load());
      continue;
    }
    wait_until([&] { return arrival->here.load(); });
    CHECK(arrival->error && arrival->error->code() == ErrorCode::version_mismatch);
    CHECK_EQUAL(arrival->error->where().field, "message layouts");
    CHECK_EQUAL(arrival->error->where().rank, 1);
    CHECK_EQUAL(arrival->error->where().peer, 0);
  }
}

TEST(tcp_dialer_refuses_who_listens_in_a_ranks_place) {
  const World world(2);
  const auto segment = world.arena(0)->segment();
  const auto other_job = World(2).arena(0)->segment();
  const auto left = tcp_transport(segment, 0, "here");
  const TcpDoor impostor(other_job, 1);
  segment->show_address(1, impostor.addresses());
  const auto sender = std::move(left->connect(world.members()[1], kTcpStream, 1)->poll(now())[0]);
  const auto word = pattern(8);
  CHECK_THROWS(
      wait_until([&] { return sender->write(word) > 0; }), Error,
      e.code() == ErrorCode::authentication && e.where().peer == 1 && e.where().field == "proof");
}

TEST(tcp_wakes_a_parked_rank_for_what_it_waits_for_and_nothing_else) {
  TwoOverTcp two;
  const auto word = pattern(8);
  two.send(0, word);
  CHECK(two.receive(1, 8) == word);
  two.transports[1]->woken();
  two.transports[1]->before_park();
  CHECK(!is_readable(two.wake_fd(1)));
  two.send(0, word);  // nobody has asked for it
  two.transports[1]->before_park();
  CHECK(!is_readable(two.wake_fd(1)));
  CHECK(two.receive(1, 8) == word);
  CHECK(two.ends[1]->peek(1).empty());  // from now on it waits
  two.transports[1]->before_park();
  CHECK(!is_readable(two.wake_fd(1)));
  two.send(0, word);
  wait_until([&] { return is_readable(two.wake_fd(1)); });
  CHECK(two.receive(1, 8) == word);
  two.transports[1]->before_park();
  CHECK(!is_readable(two.wake_fd(1)));
}

TEST(tcp_wakes_a_parked_writer_when_there_is_room) {
  TwoOverTcp two;
  const auto flood = pattern(1 << 20);
  size_t taken = 0;
  two.send(0, std::span(flood).first(1));
  wait_until([&] {  // until the kernel takes no more
    const size_t more = two.ends[0]->write(flood);
    taken += more;
    return more == 0;
  });
  two.transports[0]->woken();
  two.transports[0]->before_park();
  CHECK(!is_readable(two.wake_fd(0)));
  two.receive(1, 1 + taken);
  wait_until([&] { return is_readable(two.wake_fd(0)); });
  CHECK(two.ends[0]->write(flood) > 0);
}

TEST(tcp_a_peer_that_has_closed_wakes_nobody_who_waits_for_nothing) {
  TwoOverTcp two;
  const auto word = pattern(8);
  two.send(0, word);
  CHECK(two.receive(1, 8) == word);
  CHECK(two.ends[1]->peek(1).empty());
  two.transports[1]->before_park();
  two.ends[0].reset();
  wait_until([&] { return is_readable(two.wake_fd(1)); });
  CHECK(two.ends[1]->peek(1).empty());  // the end has been seen
  two.transports[1]->woken();
  two.transports[1]->before_park();
  CHECK(!is_readable(two.wake_fd(1)));
}

TEST(tcp_a_reset_is_an_error_that_names_the_peer_unless_that_has_gone) {
  for (const bool gone : {false, true}) {
    const testing::Note note("gone ", gone);
    std::atomic<int> asked{0};
    TwoOverTcp two([&](int rank, TimePoint) {
      CHECK_EQUAL(rank, 0);
      ++asked;
      return gone;
    });
    const auto word = pattern(8);
    two.send(0, word);
    CHECK(two.receive(1, 8) == word);
    two.send(1, word);    // which rank 0 never reads:
    two.ends[0].reset();  // its kernel resets the connection
    const auto look = [&] { two.ends[1]->peek(1); };
    if (gone) {
      wait_until([&] { return look(), asked > 0; });
      continue;
    }
    CHECK_THROWS(wait_until([&] { return look(), false; }), Error,
                 e.code() == ErrorCode::link && e.where().peer == 0 && asked > 0);
  }
}

TEST(tcp_reads_what_was_written_before_a_reset) {
  TwoOverTcp two;
  const auto word = pattern(3000);
  two.send(0, std::span(word).first(1));
  two.receive(1, 1);
  two.send(1, word);
  two.send(0, word);
  two.ends[0].reset();
  CHECK(two.receive(1, word.size()) == word);
}

TEST(tcp_leaves_no_descriptor_behind) {
  const size_t before = open_descriptors();
  for (int round = 0; round < 20; ++round) {
    TwoOverTcp two;
    const auto word = pattern(8);
    two.send(0, word);
    CHECK(two.receive(1, 8) == word);
  }
  CHECK_EQUAL(open_descriptors(), before);
}
