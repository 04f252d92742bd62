// A control line delivers each message once and in order, also when its connection is replaced.
#include <sys/socket.h>

#include <optional>
#include <random>
#include <span>
#include <string>
#include <utility>
#include <vector>

#include "base/error.h"
#include "check.h"
#include "control/control_line.h"

using namespace farandole;

namespace {

/// Two ends, and the numbers of the questions that each has received.
struct Lines {
  ControlLine ends[2];
  std::vector<uint64_t> taken[2];
  uint64_t asked[2] = {};

  void connect(bool hides) {
    int sockets[2] = {-1, -1};
    CHECK(::socketpair(AF_UNIX, SOCK_STREAM | SOCK_NONBLOCK | SOCK_CLOEXEC, 0, sockets) == 0);
    ConnectionKeys keys[2];
    fill_with_random_bytes(keys[0].out);
    fill_with_random_bytes(keys[0].in);
    keys[1] = {.out = keys[0].in, .in = keys[0].out};
    for (const size_t i : {0, 1}) ends[i].open({Fd(sockets[i]), keys[i]}, hides);
  }
  void lose_connection() {
    for (ControlLine& end : ends) end.close();
  }
  void ask(size_t who) { ends[who].send(frame_of<QuestionMessage>(asked[who]++, 0)); }
  void beat(size_t who) { ends[who].send(frame_of<BeatMessage>(ends[who].taken())); }
  /// Takes the messages that have arrived, with at most `most` reads of the socket.
  void read(size_t who, int most = 100) {
    ControlLine& end = ends[who];
    while (most-- > 0 && end.is_open() && end.receive() > 0)
      while (const auto message = end.next()) {
        WireReader from(*message);
        take(who, from);
        from.end();
      }
  }
  void take(size_t who, WireReader& from) {
    switch (from.get_enum(ControlFrame::death)) {
      case ControlFrame::resume:
        return ends[who].resume(get_message<ResumeMessage>(from).taken);
      case ControlFrame::beat:
        return ends[who].acknowledge(get_message<BeatMessage>(from).taken);
      default:
        taken[who].push_back(get_message<QuestionMessage>(from).key);
    }
  }
  void settle() {
    for (int i = 0; i < 3; ++i)
      for (const size_t who : {0, 1}) {
        ends[who].flush();
        read(1 - who);
      }
  }
  bool all_came_once() const {
    for (const size_t who : {0, 1}) {
      if (taken[who].size() != asked[1 - who]) return false;
      for (size_t i = 0; i < taken[who].size(); ++i)
        if (taken[who][i] != i) return false;
    }
    return true;
  }
};

}  // namespace

TEST(control_line_keeps_what_was_sent_before_it_was_open) {
  Lines lines;
  lines.ask(0);
  lines.connect(false);
  lines.ask(1);
  CHECK(lines.ends[0].has_unsent());
  lines.settle();
  CHECK(!lines.ends[0].has_unsent());
  CHECK(lines.all_came_once());
}

TEST(control_line_takes_each_message_once_over_many_connections) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    const testing::Note note("seed ", seed);
    std::mt19937 random(seed);
    const auto roll = [&](unsigned sides) { return random() % sides; };
    Lines lines;
    for (int turn = 0; turn < 300; ++turn) {
      const size_t who = roll(2);
      switch (roll(8)) {
        case 0:
          lines.connect(roll(2) == 0);
          break;
        case 1:
          if (roll(3) == 0) lines.lose_connection();
          break;
        case 2:
          lines.beat(who);
          break;
        case 3:
          lines.read(who, 1);
          break;
        case 4:
          if (lines.ends[who].is_open()) lines.ends[who].flush();
          break;
        default:
          lines.ask(who);
      }
    }
    lines.connect(false);
    lines.settle();
    CHECK(lines.all_came_once());
  }
}

TEST(control_line_keeps_nothing_that_the_other_end_has) {
  Lines lines;
  lines.connect(false);
  for (int i = 0; i < 5; ++i) lines.ask(0);
  lines.settle();
  lines.beat(1);
  lines.settle();
  lines.lose_connection();
  lines.connect(false);
  CHECK(!lines.ends[0].has_unsent() || lines.ends[0].taken() == 0);
  lines.settle();
  CHECK(lines.all_came_once());
}

TEST(control_line_refuses_numbers_that_cannot_be) {
  const auto refusal = [](Lines& lines, uint64_t taken) -> std::string {
    try {
      lines.ends[0].acknowledge(taken);
    } catch (const Malformed& error) {
      return error.why();
    }
    return "";
  };
  Lines lines;
  lines.connect(false);
  lines.ask(0);
  lines.ask(0);
  CHECK_EQUAL(refusal(lines, 3), "that 3 control messages have come");
  CHECK_EQUAL(refusal(lines, 2), "");
  CHECK_EQUAL(refusal(lines, 1), "that 1 control messages have come");  // it had acknowledged two
}
