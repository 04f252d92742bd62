#include "control/meeting_words.h"

#include <unistd.h>

#include <cstring>

#include "base/fixed_text.h"
#include "base/version.h"
#include "control/local_socket.h"

namespace farandole {
namespace {

/// Before they have met: that they do not come is told by who waits for them, over TCP.
void add_elsewhere(Host& host, int rank, const RankElsewhere& other) {
  host.peers.push_back({{rank, other.host, other.pid, other.addresses}, {}, {}, {}, false});
  host.segment->set_apart(rank);
  host.segment->show_state(rank, RankState::present);
}

}  // namespace

Hello hello_from(const Invitation& me) {
  Hello h{};
  h.protocol = kMeetingProtocol;
  h.rank = me.rank;
  h.size = me.size;
  h.pid = ::getpid();
  copy_cut(version(), h.version);
  if (me.settings.size() >= sizeof h.settings || me.agree.size() > kMostAgreed)
    throw Error(ErrorCode::internal, "what ranks must agree on is too long to be told");
  copy_cut(me.settings, h.settings);
  copy_cut(me.agree, h.agree);
  const CpuSet set = usable_cpus();
  for (size_t i = 0; i < set.size(); ++i)
    if (set[i]) h.cpus[i / 64] |= uint64_t{1} << (i % 64);
  return h;
}

Seat seat_from(const Hello& hello) {
  Seat m{};
  m.pid = hello.pid;
  std::memcpy(m.cpus, hello.cpus, sizeof m.cpus);
  return m;
}

CpuSet cpus_of(const Seat& member) {
  CpuSet set;
  for (size_t i = 0; i < set.size(); ++i) set[i] = (member.cpus[i / 64] >> (i % 64)) & 1;
  return set;
}

std::string who(const Hello& h) {
  return "rank " + std::to_string(h.rank) + " of " + std::to_string(h.size) + " (pid " +
         std::to_string(h.pid) + ")";
}

Host seated(const Invitation& me, std::shared_ptr<Segment> segment,
            const std::vector<Seat>& members, std::vector<Fd> fds, std::string handed_out) {
  Host host{me.rank, {}, std::move(segment), {}, std::move(handed_out)};
  size_t seat = 0;
  for (int r = 0; r < me.size; ++r) {
    const RankElsewhere* other = me.others ? &me.others->ranks[static_cast<size_t>(r)] : nullptr;
    const std::string name = other == nullptr ? "local" : other->host;
    if (other != nullptr && name != me.others->ranks[static_cast<size_t>(me.rank)].host) {
      add_elsewhere(host, r, *other);
      continue;
    }
    host.peers.push_back({{r, name, members[seat].pid, {}},
                          cpus_of(members[seat]),
                          std::move(fds[2 * seat]),
                          std::move(fds[2 * seat + 1])});
    ++seat;
  }
  // All ranks are present from the moment the segment is theirs; absent means not yet mapped.
  host.segment->show_state(me.rank, RankState::present);
  return host;
}

bool send_refusal(int socket, const Error& error) {
  Answer answer{};
  answer.code = static_cast<int32_t>(error.code());
  answer.rank = error.where().rank;
  answer.pid = error.where().pid;
  copy_cut(error.verdict(), answer.text);
  copy_cut(error.advice(), answer.advice);
  return send_message(socket, &answer, sizeof answer);
}

ErrorCode code_in(int32_t number) {
  const bool known = number >= 0 && static_cast<size_t>(number) < kErrors.size();
  return known ? static_cast<ErrorCode>(number) : ErrorCode::rendezvous;
}

Error refusal_in(const Answer& answer) {
  Context where;
  where.rank = answer.rank;
  where.pid = answer.pid;
  return {code_in(answer.code), text_in(answer.text), std::move(where), text_in(answer.advice)};
}

Error as_told(const Hello& by, const Error& error) {
  Context where;
  where.rank = by.rank;
  where.pid = by.pid;
  return {error.code(), who(by) + " could not meet the others: " + error.verdict(),
          std::move(where), error.advice()};
}

}  // namespace farandole
