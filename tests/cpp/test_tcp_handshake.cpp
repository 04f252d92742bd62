// The handshake of TCP connections, on bytes alone, without a socket.
#include <algorithm>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "check.h"
#include "transport/tcp_handshake.h"

using namespace farandole;

namespace {

using Bytes = std::vector<std::byte>;
using Alter = std::function<void(Bytes&)>;

constexpr TcpLane kLane{.dialer = 1, .listener = 2, .stream_key = 0x1122334455667788, .lane = 3};
constexpr int kRanksOfJob = 4;

std::array<std::byte, 32> secret_of(int job) {
  std::array<std::byte, 32> secret{};
  secret.fill(static_cast<std::byte>(job));
  return secret;
}
const std::array<std::byte, 32> kSecret = secret_of(7), kOther = secret_of(8);

Bytes taken(TcpHandshake& from) {
  const auto out = from.to_send();
  Bytes bytes(out.begin(), out.end());
  from.sent(bytes.size());
  return bytes;
}

/// Passes `from`'s bytes to `to`, as far as `to` wants to read.
void carry(TcpHandshake& from, TcpHandshake& to, Bytes& pipe, const Alter& alter) {
  Bytes said = taken(from);
  if (!said.empty() && alter) alter(said);
  pipe.insert(pipe.end(), said.begin(), said.end());
  for (size_t want = to.to_read(); want > 0 && pipe.size() >= want; want = to.to_read()) {
    CHECK(want <= 256U);  // read before anything is proved
    to.take(std::span(pipe).first(want));
    pipe.erase(pipe.begin(), pipe.begin() + static_cast<std::ptrdiff_t>(want));
  }
}

struct Talk {
  TcpHandshake dialer = TcpHandshake::dial(kLane, kSecret);
  TcpHandshake listener = TcpHandshake::listen(kLane.listener, kRanksOfJob, kSecret);

  /// `hello`, `answer` and `proof` may change what travels.
  void run(const Alter& hello = {}, const Alter& answer = {}, const Alter& proof = {}) {
    Bytes there, back;
    carry(dialer, listener, there, hello);
    carry(listener, dialer, back, answer);
    carry(dialer, listener, there, proof);
  }
};

Alter flip(size_t at) {
  return [at](Bytes& bytes) { bytes[at] ^= std::byte{1}; };
}

/// Where each field of a hello begins.
struct Field {
  std::string_view name;
  size_t at;
  ErrorCode code;
};
constexpr Field kFields[] = {
    {"magic", 0, ErrorCode::authentication},
    {"protocol", 8, ErrorCode::version_mismatch},
    {"byte order", 12, ErrorCode::version_mismatch},
    {"message layouts", 16, ErrorCode::version_mismatch},
    {"role", 24, ErrorCode::authentication},
};

}  // namespace

TEST(tcp_handshake_of_two_ranks_of_a_job) {
  Talk talk;
  talk.run();
  CHECK(talk.dialer.agreed());
  CHECK(talk.listener.agreed());
  CHECK(talk.listener.lane() == kLane);
  CHECK_EQUAL(talk.listener.to_read(), 0U);  // all that follows is data
}

TEST(tcp_handshake_gives_both_ends_the_same_keys_and_each_direction_and_talk_its_own) {
  Talk talk, another;
  talk.run();
  another.run();
  const ConnectionKeys dials = talk.dialer.keys(), listens = talk.listener.keys();
  CHECK(dials.out == listens.in);
  CHECK(dials.in == listens.out);
  CHECK(dials.in != dials.out);
  CHECK(dials.out != another.dialer.keys().out);
}

TEST(tcp_handshake_has_one_layout_for_ever) {
  TcpHandshake dialer = TcpHandshake::dial(kLane, kSecret);
  const Bytes hello = taken(dialer);
  CHECK_EQUAL(hello.size(), 80U);
  const std::string_view magic = "farandol";
  CHECK(std::ranges::equal(std::span(hello).first(8), std::as_bytes(std::span(magic))));
  const auto number = [&](size_t at, size_t bytes) {
    uint64_t value = 0;
    for (size_t i = 0; i < bytes; ++i) value |= std::to_integer<uint64_t>(hello[at + i]) << 8 * i;
    return value;
  };
  CHECK_EQUAL(number(8, 4), 11U);  // the protocol
  CHECK_EQUAL(number(24, 4), 0U);
  CHECK_EQUAL(number(28, 4), 1U);
  CHECK_EQUAL(number(32, 4), 2U);
  CHECK_EQUAL(number(36, 4), 3U);
  CHECK_EQUAL(number(40, 8), kLane.stream_key);
}

TEST(tcp_handshake_names_both_ends_and_the_field_that_differs) {
  for (const Field& field : kFields) {
    const testing::Note note("field ", field.name);
    Talk wrong_hello;
    wrong_hello.run(flip(field.at));
    CHECK(wrong_hello.listener.refusal());
    CHECK(!wrong_hello.dialer.agreed());
    CHECK(wrong_hello.listener.refusal()->code() == field.code);
    CHECK_EQUAL(wrong_hello.listener.refusal()->where().field, field.name);

    Talk wrong_answer;
    wrong_answer.run({}, flip(field.at));
    CHECK(wrong_answer.dialer.refusal());
    CHECK(!wrong_answer.listener.agreed());
    const Error& error = *wrong_answer.dialer.refusal();
    CHECK(error.code() == field.code);
    CHECK_EQUAL(error.where().field, field.name);
    CHECK_EQUAL(error.where().rank, 1);
    CHECK_EQUAL(error.where().peer, 2);
    CHECK(error.verdict().find("rank 1") != std::string::npos);
    CHECK(error.verdict().find("rank 2") != std::string::npos);
  }
}

TEST(tcp_handshake_tells_a_dialer_of_another_version_what_the_listener_has) {
  Talk talk;
  Bytes there, back;
  carry(talk.dialer, talk.listener, there, flip(8));
  CHECK(talk.listener.refusal());
  CHECK_EQUAL(talk.listener.to_send().size(), 112U);
  TcpHandshake stranger = TcpHandshake::listen(2, kRanksOfJob, kSecret);
  Bytes garbage(80, std::byte{'G'});
  stranger.take(garbage);
  CHECK(stranger.refusal());
  CHECK(stranger.to_send().empty());  // a peer without the magic gets no answer
}

TEST(tcp_handshake_knows_no_rank_whose_words_were_changed_on_their_way) {
  Talk talk;
  talk.run(flip(16));
  CHECK(talk.listener.refusal());
  CHECK(!talk.listener.proved());
  CHECK(!talk.dialer.proved());
}

TEST(tcp_handshake_notices_every_byte_that_is_changed) {
  for (size_t at = 0; at < TcpHello::kBytes; ++at) {
    const testing::Note note("hello, byte ", at);
    Talk talk;
    talk.run(flip(at));
    CHECK(!talk.dialer.agreed());
    CHECK(!talk.listener.agreed());
  }
  for (size_t at = 0; at < TcpHandshake::kMostRead; ++at) {
    const testing::Note note("answer, byte ", at);
    Talk talk;
    talk.run({}, flip(at));
    CHECK(talk.dialer.refusal());
    CHECK(!talk.listener.agreed());
  }
  for (size_t at = 0; at < sizeof(Digest); ++at) {
    const testing::Note note("proof, byte ", at);
    Talk talk;
    talk.run({}, {}, flip(at));
    CHECK(talk.listener.refusal());
    CHECK_EQUAL(talk.listener.refusal()->where().field, "proof");
  }
}

TEST(tcp_handshake_refuses_who_has_another_jobs_secret) {
  Talk dials;
  dials.dialer = TcpHandshake::dial(kLane, kOther);
  dials.run();
  CHECK(dials.dialer.refusal());
  CHECK(dials.dialer.refusal()->code() == ErrorCode::authentication);
  CHECK(!dials.listener.agreed());
  Talk listens;
  listens.listener = TcpHandshake::listen(2, kRanksOfJob, kOther);
  listens.run();
  CHECK_EQUAL(listens.dialer.refusal()->where().field, "proof");
  CHECK(!listens.listener.agreed());
}

TEST(tcp_handshake_refuses_ranks_that_do_not_dial) {
  for (const TcpLane& lane :
       {TcpLane{3, 2, 5, 0},                               // the higher one
        TcpLane{2, 2, 5, 0},                               // itself
        TcpLane{1'000'000, 2, 5, 0}, TcpLane{1, 3, 5, 0},  // meant for another rank
        TcpLane{1, 2, 5, kMostTcpLanes}}) {
    const testing::Note note("from ", lane.dialer, " to ", lane.listener, ", lane ", lane.lane);
    Talk talk;
    talk.dialer = TcpHandshake::dial(lane, kSecret);
    talk.run();
    CHECK(talk.listener.refusal());
    CHECK(!talk.listener.agreed());
  }
}

TEST(tcp_handshake_refuses_what_was_said_before) {
  Talk first;
  Bytes hello, answer, proof;
  const auto record = [](Bytes& into) { return [&into](Bytes& bytes) { into = bytes; }; };
  first.run(record(hello), record(answer), record(proof));
  CHECK(first.listener.agreed());

  TcpHandshake listener = TcpHandshake::listen(2, kRanksOfJob, kSecret);
  listener.take(hello);
  CHECK(taken(listener) != answer);
  listener.take(proof);
  CHECK(listener.refusal());
  CHECK(!listener.agreed());

  TcpHandshake dialer = TcpHandshake::dial(kLane, kSecret);
  CHECK(taken(dialer) != hello);
  dialer.take(answer);
  CHECK(dialer.refusal());
  CHECK_EQUAL(dialer.refusal()->where().field, "proof");
}

TEST(tcp_handshake_refuses_its_own_words) {
  TcpHandshake dialer = TcpHandshake::dial(kLane, kSecret);
  Bytes echo = taken(dialer);
  echo.resize(TcpHandshake::kMostRead);
  dialer.take(echo);
  CHECK_EQUAL(dialer.refusal()->where().field, "role");

  Talk talk;  // the listener's own proof, sent back to it
  Bytes there, back;
  carry(talk.dialer, talk.listener, there, {});
  const Bytes answer = taken(talk.listener);
  talk.listener.take(std::span(answer).subspan(TcpHello::kBytes));
  CHECK(talk.listener.refusal());
}

TEST(tcp_handshake_lets_no_garbage_in) {
  constexpr uint32_t kSeed = 20;
  std::mt19937 random(kSeed);
  for (int round = 0; round < 2000; ++round) {
    const testing::Note note("seed ", kSeed, ", round ", round);
    TcpHandshake listener = TcpHandshake::listen(2, kRanksOfJob, kSecret);
    TcpHandshake dialer = TcpHandshake::dial(kLane, kSecret);
    Bytes hello = taken(dialer);
    for (int i = 0; i < 1 + round % 5; ++i)
      hello[random() % hello.size()] = static_cast<std::byte>(random());
    listener.take(hello);
    if (listener.to_read() == 0) continue;
    Bytes proof(listener.to_read());
    std::ranges::generate(proof, [&] { return static_cast<std::byte>(random()); });
    listener.take(proof);
    CHECK(listener.refusal());
  }
}
