// An attacker between two hosts that does not know the job's secret. Messages that it changes,
// repeats, drops, swaps, truncates or forges end in an error that names them. A rank never receives
// a message that its peer has not sent.
#include <poll.h>
#include <sys/socket.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cstring>
#include <deque>
#include <functional>
#include <memory>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "check.h"
#include "hosts_in_threads.h"
#include "transport/message_link.h"
#include "transport/ready_channels.h"
#include "transport/tcp_records.h"

namespace farandole {
namespace {

using Frame = std::vector<std::byte>;

/// Maps the next frame of one direction to the frames that arrive in its place.
using Act = std::function<std::vector<Frame>(Frame)>;

struct Deed {
  std::string name;
  std::function<Act()> begin;
};

/// Attacks on the third frame, one of which swaps it with the fourth; and on the first, by which a
/// connection begins.
const std::vector<Deed>& deeds() {
  const auto at_number = [](int number, auto change) {
    return [number, change]() -> Act {
      return [number, change, count = 0](Frame frame) mutable -> std::vector<Frame> {
        if (++count != number) return {std::move(frame)};
        return change(std::move(frame));
      };
    };
  };
  const auto at_the_third = [&](auto change) { return at_number(3, change); };
  const auto changed = [](Frame frame) -> std::vector<Frame> {
    frame[sizeof(uint32_t)] ^= std::byte{1};
    return {frame};
  };
  static const std::vector<Deed> all{
      {"changes a message", at_the_third(changed)},
      {"changes the first message", at_number(1, changed)},
      {"changes a seal", at_the_third([](Frame frame) -> std::vector<Frame> {
         frame.back() ^= std::byte{0x80};
         return {frame};
       })},
      {"cuts a message", at_the_third([](Frame frame) -> std::vector<Frame> {
         frame.pop_back();
         return {frame};
       })},
      {"repeats a message",
       at_the_third([](const Frame& frame) -> std::vector<Frame> { return {frame, frame}; })},
      {"leaves out a message", at_the_third([](const Frame&) { return std::vector<Frame>(); })},
      {"makes up a message", at_the_third([](const Frame& frame) -> std::vector<Frame> {
         return {Frame(frame.size(), std::byte{0}), frame};
       })},
      {"exchanges two messages",
       []() -> Act {
         return [held = Frame(), count = 0](Frame frame) mutable -> std::vector<Frame> {
           if (++count == 3) {
             held = std::move(frame);
             return {};
           }
           if (count == 4) return {std::move(frame), std::move(held)};
           return {std::move(frame)};
         };
       }},
  };
  return all;
}

/// Applies an act to the bytes that pass in one direction of a connection.
class Flow {
 public:
  /// `least`: the smallest frame that is acted on, in bytes.
  Flow(Act act, size_t least) : act_(std::move(act)), least_(least) {}

  /// Returns the bytes to forward. A handshake passes unchanged; without an act, all bytes do.
  Frame passed(std::span<const std::byte> bytes) {
    waiting_.insert(waiting_.end(), bytes.begin(), bytes.end());
    if (!act_) return std::exchange(waiting_, {});
    Frame on;
    move(std::min(handshake_, waiting_.size()), on);
    handshake_ -= on.size();
    for (;;) {
      uint32_t length = 0;
      if (waiting_.size() < sizeof length) return on;
      std::memcpy(&length, waiting_.data(), sizeof length);
      const size_t whole = sizeof length + length + Seals::kBytes;
      if (waiting_.size() < whole) return on;
      Frame frame;
      move(whole, frame);
      if (frame.size() < least_) {
        on.insert(on.end(), frame.begin(), frame.end());
        continue;
      }
      for (const Frame& each : act_(std::move(frame)))
        on.insert(on.end(), each.begin(), each.end());
    }
  }

 private:
  void move(size_t count, Frame& to) {
    const auto end = waiting_.begin() + static_cast<std::ptrdiff_t>(count);
    to.insert(to.end(), waiting_.begin(), end);
    waiting_.erase(waiting_.begin(), end);
  }

  Act act_;  // empty: all bytes pass unchanged
  size_t least_;
  size_t handshake_ = TcpHandshake::kMostRead;  // bytes of it that are still to pass
  Frame waiting_;
};

/// Listens in a rank's place and forwards both directions.
class Relay {
 public:
  /// `direction`: 0 acts on bytes to the rank, 1 on bytes from it. `on_control`: acts on control
  /// messages, else on records of tensors.
  Relay(const TcpAddress& rank, const Deed& deed, size_t direction, bool on_control)
      : rank_(rank),
        deed_(deed),
        direction_(direction),
        on_control_(on_control),
        listener_(listen_on_loopback(4)),
        thread_([this] { main(); }) {}
  ~Relay() {
    stopping_ = true;
    thread_.join();
  }
  TcpAddress address() const { return TcpAddress::of_listener(listener_.get()); }

 private:
  struct Between {
    std::array<Fd, 2> sockets;  // of the dialer, of the rank
    std::vector<Flow> flows;    // from each of them; empty until the dialer's hello is complete
    Frame hello;
  };

  void main() {
    while (!stopping_) {
      std::vector<pollfd> ready{{listener_.get(), POLLIN, 0}};
      for (const auto& each : betweens_)
        for (const Fd& socket : each->sockets)
          if (socket) ready.push_back({socket.get(), POLLIN, 0});
      ::poll(ready.data(), ready.size(), 10);
      Fd come(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC | SOCK_NONBLOCK));
      if (come) {
        auto between = std::make_unique<Between>();
        between->sockets = {std::move(come), begin_to_connect(rank_)};
        betweens_.push_back(std::move(between));
      }
      for (const auto& each : betweens_)
        for (const size_t from : {size_t{0}, size_t{1}}) pass(*each, from);
    }
  }

  void pass(Between& between, size_t from) {
    if (!between.sockets[0] || !between.sockets[1]) return;
    std::array<std::byte, 65536> some;
    const ssize_t count = ::recv(between.sockets[from].get(), some.data(), some.size(), 0);
    if (count < 0) return;  // nothing, or not connected yet
    if (count == 0) {
      for (Fd& socket : between.sockets) socket.reset();
      return;
    }
    std::span<const std::byte> bytes(some.data(), static_cast<size_t>(count));
    if (between.flows.empty()) {
      between.hello.insert(between.hello.end(), bytes.begin(), bytes.end());
      if (between.hello.size() < TcpHello::kBytes) return;
      bytes = between.hello;
      const TcpHello hello = TcpHello::decoded(bytes.first<TcpHello::kBytes>());
      const bool acts = on_control_ == (hello.lane == kMostTcpLanes - 1);
      for (const size_t direction : {size_t{0}, size_t{1}})
        between.flows.emplace_back(acts && direction == direction_ ? deed_.begin() : Act(),
                                   on_control_ ? 0 : 1000);
    }
    const Frame on = between.flows[from].passed(bytes);
    send_all(between.sockets[1 - from], on);
  }

  void send_all(const Fd& to, std::span<const std::byte> bytes) const {
    while (!bytes.empty() && !stopping_) {
      const ssize_t sent = ::send(to.get(), bytes.data(), bytes.size(), MSG_NOSIGNAL);
      if (sent > 0) bytes = bytes.subspan(static_cast<size_t>(sent));
      if (sent < 0 && errno != EAGAIN && errno != ENOTCONN) return;
    }
  }

  const TcpAddress rank_;
  const Deed& deed_;
  const size_t direction_;
  const bool on_control_;
  Fd listener_;
  std::vector<std::unique_ptr<Between>> betweens_;
  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: it uses all other members
};

/// The error on each of two hosts.
std::array<std::string, 2> ends_by(const Deed& deed, size_t direction, Wire wire, bool on_control) {
  std::vector<testing::Place> all = testing::places(2);
  const Relay relay(TcpAddress::from(all[1].addresses).value(), deed, direction, on_control);
  all[1].addresses.clear();
  all[1].show(relay.address());
  std::array<std::string, 2> errors;
  const auto body = [&](const std::shared_ptr<Group>& world) {
    std::string& error = errors[static_cast<size_t>(world->rank())];
    const Deadline patience = testing::patience();
    while (error.empty() && !patience.passed(now())) {
      testing::Sum ours(world->rank(), 2, on_control ? 1000 : 300'007);
      try {
        error = testing::error_of(testing::sum(*world, ours.data));
      } catch (const Error& failed) {  // before the operation could begin
        error = failed.what();
      }
      CHECK(!error.empty() || ours.is_right());
      std::this_thread::sleep_for(std::chrono::milliseconds(5));
    }
  };
  testing::run_hosts(std::move(all), body, wire);
  return errors;
}

bool names(const std::string& error, const std::string& what, size_t direction) {
  const std::string who = direction == 0 ? " from rank 0 " : " from rank 1 ";
  return error.find(what + who) != std::string::npos &&
         error.find(" malformed: ") != std::string::npos;
}

TEST(strangers_among_control_messages_are_named_on_all_hosts) {
  size_t direction = 0;
  for (const Deed& deed : deeds()) {
    const Wire wire = direction == 0 ? Wire::plain : Wire::sealed;
    const testing::Note note(deed.name, ", direction ", direction);
    for (const std::string& error : ends_by(deed, direction, wire, true))
      CHECK(names(error, "a control message", direction));
    direction = 1 - direction;
  }
}

TEST(strangers_among_sealed_data_are_named_on_all_hosts) {
  size_t direction = 0;
  for (const Deed& deed : deeds()) {
    const Wire wire = direction == 0 ? Wire::checked : Wire::sealed;
    const testing::Note note(deed.name, ", direction ", direction);
    for (const std::string& error : ends_by(deed, direction, wire, false))
      CHECK(names(error, "data", direction));
    direction = 1 - direction;
  }
}

TEST(strangers_see_no_byte_of_what_is_encrypted) {
  const ConnectionKeys keys{.out = {std::byte{1}}, .in = {std::byte{1}}};
  const Frame secret(1000, std::byte{'s'});
  for (const bool hides : {false, true}) {
    TcpRecords there(keys, hides);
    CHECK_EQUAL(there.put(secret), secret.size());
    const auto record = there.to_send();
    const bool is_seen = std::search(record.begin(), record.end(), secret.begin(),
                                     secret.begin() + 8) != record.end();
    CHECK_EQUAL(is_seen, !hides);
    TcpRecords here(keys, hides);
    std::ranges::copy(record, here.room().begin());
    here.arrived(record.size());
    Frame shown(here.next());
    here.take(shown.data());
    CHECK(shown == secret);
  }
}

/// A sealed channel over two queues, whose bytes an attacker may change. For one thread.
class Carried : public Channel {
 public:
  Carried(const ConnectionKeys& keys, std::deque<std::byte>& out, std::deque<std::byte>& in)
      : seals_(keys), out_(out), in_(in) {}
  size_t write(std::span<const std::byte> bytes) override {
    out_.insert(out_.end(), bytes.begin(), bytes.end());
    return bytes.size();
  }
  bool drained() override { return true; }
  bool copies() const override { return true; }
  std::span<const std::byte> peek(size_t at_least) override {
    shown_.assign(in_.begin(), in_.end());
    return shown_.size() < at_least ? std::span<const std::byte>() : shown_;
  }
  void consume(size_t count) override {
    in_.erase(in_.begin(), in_.begin() + static_cast<std::ptrdiff_t>(count));
  }
  bool is_sealed() const override { return true; }
  Seals* seals() override { return &seals_; }

 private:
  Seals seals_;
  std::deque<std::byte>& out_;
  std::deque<std::byte>& in_;
  Frame shown_;
};

std::unique_ptr<MessageLink> link_over(const ConnectionKeys& keys, std::deque<std::byte>& out,
                                       std::deque<std::byte>& in) {
  std::vector<std::unique_ptr<Channel>> channels;
  channels.push_back(std::make_unique<Carried>(keys, out, in));
  return std::make_unique<MessageLink>(std::make_unique<ReadyChannels>(std::move(channels)));
}

Frame message_number(int number) { return Frame(4, static_cast<std::byte>(number)); }

/// The messages that arrive, of six, and the error that stops the rest.
std::pair<std::vector<Frame>, std::string> carried_by(const Act& act) {
  const Key there{std::byte{1}}, back{std::byte{2}};
  std::deque<std::byte> sent, arriving;
  const auto from = link_over({.out = there, .in = back}, sent, arriving);
  for (int i = 0; i < 6; ++i) from->send(message_number(i));
  while (!from->sent()) from->poll();
  constexpr size_t kFrame = 2 * sizeof(uint32_t) + 4 + Seals::kBytes;
  CHECK_EQUAL(sent.size(), 6 * kFrame);
  for (auto at = sent.begin(); at != sent.end(); at += kFrame)
    for (const Frame& each : act(Frame(at, at + kFrame)))
      arriving.insert(arriving.end(), each.begin(), each.end());

  std::deque<std::byte> nothing;
  const auto to = link_over({.out = back, .in = there}, nothing, arriving);
  std::vector<Frame> got;
  try {
    for (int i = 0; i < 20; ++i) {
      to->poll();
      for (Frame message; to->receive(message);) got.push_back(std::move(message));
    }
  } catch (const Error& error) {
    for (int again = 0; again < 3; ++again) {  // by a rank that has not given up yet
      CHECK_THROWS(to->poll(), Malformed, !e.why().empty());
      Frame message;
      CHECK(!to->receive(message));
    }
    return {got, error.what()};
  }
  return {got, ""};
}

bool are_the_first(const std::vector<Frame>& got) {
  for (size_t i = 0; i < got.size(); ++i)
    if (got[i] != message_number(static_cast<int>(i))) return false;
  return true;
}

TEST(strangers_among_messages_of_a_link_are_noticed) {
  const auto [all, none] = carried_by([](Frame frame) -> std::vector<Frame> { return {frame}; });
  CHECK_EQUAL(none, "");
  CHECK_EQUAL(all.size(), 6U);
  for (const Deed& deed : deeds()) {
    const testing::Note note(deed.name);
    const auto [got, error] = carried_by(deed.begin());
    CHECK(error.find("seal is broken") != std::string::npos);
    CHECK(are_the_first(got));
    CHECK(got.size() <= 3);
  }
}

TEST(strangers_change_no_byte_of_a_message_of_a_link) {
  for (size_t at = 0; at < 2 * sizeof(uint32_t) + 4 + Seals::kBytes; ++at)
    for (const int bit : {0, 3, 7}) {
      const testing::Note note("byte ", at, ", bit ", bit);
      const auto [got, error] =
          carried_by([&, count = 0](Frame frame) mutable -> std::vector<Frame> {
            if (++count == 2) frame[at] ^= static_cast<std::byte>(1 << bit);
            return {frame};
          });
      CHECK(are_the_first(got));
      CHECK(got.size() <= 1);
      CHECK(at < sizeof(uint32_t) ||
            !error.empty());  // of a length that is too large more may come
    }
}

}  // namespace
}  // namespace farandole
