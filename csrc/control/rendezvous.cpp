// Rank 0 listens (control/reception.h); the others dial it, say who they are (Hello with doorbell
// and process descriptor) and receive everybody's descriptors, or the reason why nobody does.
#include "control/rendezvous.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/fixed_text.h"
#include "control/control_mesh.h"
#include "control/foreign_access.h"
#include "control/local_socket.h"
#include "control/meeting_words.h"
#include "control/reception.h"

namespace farandole {
namespace {

constexpr auto kGrace = std::chrono::seconds(4);
constexpr auto kPolite = std::chrono::seconds(5);  // who listens, and is rank 0, greets sooner
constexpr auto kLook = std::chrono::seconds(1);

Error no_rank_0(const Invitation& me, const std::string& why) {
  return {ErrorCode::rendezvous,
          "rank " + std::to_string(me.rank) + " found no rank " + std::to_string(me.holder()) +
              " of the job '" + me.job + "'" + why,
          {},
          "look at that rank's log; check that all ranks share MASTER_ADDR, MASTER_PORT "
          "and WORLD_SIZE"};
}

Error squatted(const Invitation& me, int socket, const std::string& what) {
  return no_rank_0(me, ": process " + std::to_string(process_behind(socket)) +
                           " listens in its place and " + what);
}

Error lost_holder(const Invitation& me) {
  const std::string holder = "rank " + std::to_string(me.holder());
  return Error(ErrorCode::rendezvous, holder + " went away while the ranks met", {},
               "look at that rank's log");
}

/// Whoever else holds the job's name is told by what it says, or that it says nothing; a rank 0
/// that is stopped may take its time.
void hear_greeting(const Invitation& me, int socket, Deadline deadline) {
  Greeting heard{};
  while (!readable(socket, Deadline{std::min(deadline.at, now() + kPolite)}, me.interrupted)) {
    if (deadline.passed(now())) throw no_rank_0(me, "");
    if (!stands_still(process_behind(socket))) throw squatted(me, socket, "says nothing");
  }
  if (!receive_message(socket, &heard, sizeof heard) && heard.text[0] == 0) throw lost_holder(me);
  if (text_in(heard.text) != kGreeting.text) throw squatted(me, socket, "is none");
}

/// Rank 0 may come later. A name that is taken, and nobody listens, is somebody else's.
Fd dial(const Invitation& me, Deadline deadline) {
  const LocalAddress address(me.job);
  auto pause = std::chrono::microseconds(200);
  int deaf = 0;
  for (TimePoint look = now() + kLook;;) {
    Fd socket = make_local_socket();
    if (connect_at_once(socket.get(), address)) {
      if (!same_user(socket.get()))
        throw Error(ErrorCode::authentication,
                    "rank " + std::to_string(me.holder()) + " of this job runs as another user");
      return socket;
    }
    const bool full = errno == EAGAIN;
    if (deadline.passed(now()))
      throw no_rank_0(me, full ? ": its place is held, and whoever holds it takes nobody in" : "");
    if (now() >= look) {
      look = now() + kLook;
      deaf = address.is_held_silently() ? deaf + 1 : 0;
      if (deaf == 2) throw no_rank_0(me, ": somebody holds its place and does not listen");
    }
    me.interrupted();
    std::this_thread::sleep_for(pause);
    pause = std::min(pause * 2, std::chrono::microseconds(20000));
  }
}

/// Rank 0 knows who is missing and says so at its deadline, which may be a little after mine.
Deadline patience_of(Deadline mine) {
  const auto left = std::min<Duration>(mine.left(now()), std::chrono::hours(24 * 365));
  return Deadline::after(left + kGrace);
}

Answer hear_answer(int socket, const Invitation& me, Deadline deadline, std::vector<Fd>* fds) {
  Answer answer{};
  if (!readable(socket, patience_of(deadline), me.interrupted))
    throw Error(ErrorCode::rendezvous, "not all ranks arrived before the start timeout", {},
                "look at rank 0's message for the missing ranks");
  if (!receive_message(socket, &answer, sizeof answer, fds)) throw lost_holder(me);
  if (answer.accepted == 0) throw refusal_in(answer);
  return answer;
}

Host take_seat(int socket, const Invitation& me, const Answer& answer, Fd memory,
               Deadline deadline) {
  std::vector<Seat> members(me.ranks_here().size());
  std::vector<Fd> fds;
  for (size_t i = 0; i < members.size(); i += kSeatsAtOnce) {
    const size_t n = std::min(kSeatsAtOnce, members.size() - i);
    std::vector<Fd> some;
    if (!readable(socket, patience_of(deadline), me.interrupted) ||
        !receive_message(socket, members.data() + i, n * sizeof(Seat), &some) ||
        some.size() != 2 * n)
      throw lost_holder(me);
    for (Fd& fd : some) fds.push_back(std::move(fd));
  }
  return seated(me, Segment::attach(std::move(memory)), members, std::move(fds),
                text_in(answer.text));
}

/// None where they cannot be had, which rank 0 and so all others are told.
std::vector<Fd> doorbell_and_process(Hello& mine) {
  std::vector<Fd> fds;
  try {
    fds.push_back(make_event_fd());
    fds.push_back(own_process());
  } catch (const Error& error) {
    fds.clear();
    mine.trouble_code = static_cast<int32_t>(error.code());
    copy_cut(error.verdict(), mine.trouble);
  }
  return fds;
}

void say_hello(const Invitation& me, int socket, const Hello& mine, const std::vector<Fd>& given,
               Deadline deadline) {
  std::vector<int> fds;
  for (const Fd& fd : given) fds.push_back(fd.get());
  // Where it is gone there may be an answer.
  send_patiently(socket, &mine, sizeof mine, fds, patience_of(deadline), me.interrupted);
}

Host be_guest(const Invitation& me, Deadline deadline) {
  Hello mine = hello_from(me);
  const std::vector<Fd> given = doorbell_and_process(mine);
  const Fd connection = dial(me, deadline);
  const int socket = connection.get();
  try {
    say_hello(me, socket, mine, given, deadline);
    hear_greeting(me, socket, deadline);
    std::vector<Fd> memory;
    const Answer answer = hear_answer(socket, me, deadline, &memory);
    if (memory.size() != 1) throw lost_holder(me);
    Host host = take_seat(socket, me, answer, std::move(memory[0]), deadline);
    Answer yes{};
    yes.accepted = 1;
    send_message(socket, &yes, sizeof yes);
    hear_answer(socket, me, deadline, nullptr);
    return host;
  } catch (const Error& error) {
    if (error.code() != ErrorCode::resource || error.where().rank >= 0) throw;
    const Error told = as_told(mine, error);
    send_refusal(socket, told);
    throw told;
  }
}

}  // namespace

namespace {

/// By TCP, once those of this host have met.
void meet_others(Host& host, const Invitation& me, Deadline deadline) {
  std::vector<bool> here;
  for (const HostPeer& peer : host.peers) here.push_back(peer.here);
  TcpAddresses addresses;
  for (const RankElsewhere& other : me.others->ranks) addresses.push_back(other.addresses);
  auto door = std::make_shared<TcpDoor>(host.segment, host.rank, std::move(me.others->listeners),
                                        std::move(addresses));
  host.mesh = std::make_shared<ControlMesh>(host.segment, host.rank, here, std::move(door));
  host.mesh->meet(host, deadline, me.interrupted);
}

}  // namespace

std::vector<int> Invitation::ranks_here() const {
  std::vector<int> ranks;
  for (int r = 0; r < size; ++r)
    if (!others ||
        others->ranks[static_cast<size_t>(r)].host == others->ranks[static_cast<size_t>(rank)].host)
      ranks.push_back(r);
  return ranks;
}

Host meet(const Invitation& invitation, Deadline deadline) {
  if (invitation.size < 1 || invitation.rank < 0 || invitation.rank >= invitation.size)
    throw Error(ErrorCode::rendezvous, "rank " + std::to_string(invitation.rank) +
                                           " does not exist in a world of " +
                                           std::to_string(invitation.size));
  if (invitation.hand_out.size() > kMostHandedOut)
    throw Error(ErrorCode::internal, "rank 0 hands out more than fits");
  const bool holds = invitation.rank == invitation.holder();
  Host host = invitation.size == 1 ? host_alone(invitation.arena_bytes)
              : holds              ? receive_all(invitation, deadline)
                                   : be_guest(invitation, deadline);
  if (holds) host.handed_out = invitation.hand_out;
  try {
    host.foreign =
        agree_on_foreign_access(host, invitation.foreign, deadline, invitation.interrupted);
    if (invitation.others) meet_others(host, invitation, deadline);
  } catch (...) {  // nobody shall wait for this rank
    host.segment->show_state(host.rank, RankState::gone);
    throw;
  }
  return host;
}

}  // namespace farandole
