#include "control/reception.h"

#include <sys/socket.h>

#include <algorithm>
#include <cerrno>
#include <cstring>
#include <string>

#include "base/error.h"
#include "base/fixed_text.h"
#include "control/local_socket.h"
#include "control/meeting_words.h"

namespace farandole {
namespace {

constexpr auto kLinger = std::chrono::seconds(2);  // to tell who comes later what rank 0 lacks

/// Seats are those of the ranks on this host, in order; the holder's is the first.
struct Guest {
  Fd socket;
  Hello hello{};
  Fd doorbell;
  Fd process;
};

/// Nothing for a rank that is not on this host.
std::optional<size_t> seat_of(int rank, const std::vector<int>& ranks) {
  const auto found = std::ranges::find(ranks, rank);
  if (found == ranks.end()) return std::nullopt;
  return static_cast<size_t>(found - ranks.begin());
}

/// In what all ranks must have alike.
std::optional<Error> difference(const Hello& host, const Hello& guest) {
  const std::string ours = text_in(host.settings), theirs = text_in(guest.settings);
  const std::string holder = ", rank " + std::to_string(host.rank) + " has ";
  if (ours != theirs) {
    const auto alike = std::ranges::mismatch(ours, theirs).in1 - ours.begin();
    const size_t comma = ours.substr(0, static_cast<size_t>(alike)).rfind(", ");
    const size_t begin = comma == std::string::npos ? 0 : comma + 2;
    const auto one = [&](const std::string& all) {
      return all.substr(begin, all.find(", ", begin) - begin);
    };
    return Error(ErrorCode::rendezvous, who(guest) + " has " + one(theirs) + holder + one(ours));
  }
  const std::string word = text_in(host.agree), other = text_in(guest.agree);
  if (word == other) return std::nullopt;
  return Error(ErrorCode::rendezvous,
               who(guest) + " has agree [" + other + "]" + holder + "[" + word + "]");
}

std::optional<Error> objection(const Hello& host, const Hello& guest,
                               const std::vector<Guest>& seats, const std::vector<int>& ranks) {
  const std::string holder = "rank " + std::to_string(host.rank);
  if (guest.protocol != kMeetingProtocol || std::strncmp(guest.version, host.version, 32) != 0)
    return Error(ErrorCode::version_mismatch,
                 who(guest) + " runs farandole " +
                     std::string(guest.version, ::strnlen(guest.version, 32)) + ", " + holder +
                     " runs " + host.version);
  if (guest.size != host.size)
    return Error(ErrorCode::rendezvous, who(guest) + " was started for a world of " +
                                            std::to_string(guest.size) + ", " + who(host) +
                                            " for a world of " + std::to_string(host.size));
  const auto two_are = [&](const Hello& first) {
    return Error(ErrorCode::rendezvous, "two processes are rank " + std::to_string(guest.rank) +
                                            ": pid " + std::to_string(first.pid) + " and pid " +
                                            std::to_string(guest.pid));
  };
  const std::optional<size_t> seat = seat_of(guest.rank, ranks);
  if (seat == 0U) return two_are(host);
  if (!seat)
    return Error(ErrorCode::rendezvous,
                 who(guest) + " does not exist in a world of " + std::to_string(host.size));
  if (guest.trouble[0] != 0)
    return as_told(guest, Error(code_in(guest.trouble_code), text_in(guest.trouble)));
  if (seats[*seat].socket) return two_are(seats[*seat].hello);
  return difference(host, guest);
}

Error missing(const std::vector<Guest>& seats, const std::vector<int>& ranks) {
  std::vector<int> absent;
  for (size_t s = 1; s < seats.size(); ++s)
    if (!seats[s].socket) absent.push_back(ranks[s]);
  Context where;
  where.values = {{"missing", absent}};
  return Error(ErrorCode::rendezvous,
               std::to_string(seats.size() - absent.size()) + " of " +
                   std::to_string(seats.size()) +
                   " ranks arrived; missing: " + describe_ranks(absent),
               where,
               "look at the logs of the missing ranks, or raise FARANDOLE_START_TIMEOUT; where "
               "ranks are on several hosts, LOCAL_WORLD_SIZE says how many each has");
}

/// A guest that leaves again (its socket ends) ends the meeting.
Error left(const Hello& guest) {
  Context where;
  where.rank = guest.rank;
  where.pid = guest.pid;
  return {ErrorCode::rendezvous, who(guest) + " left while the ranks met", std::move(where),
          "look at that rank's log"};
}

Fd listen_for(const std::string& job) {
  const LocalAddress address(job);
  Fd listener = make_local_socket();
  if (::bind(listener.get(), address.get(), address.length) != 0)
    throw Error(
        ErrorCode::rendezvous,
        "another rank 0 of the job '" + job + "' is already there (" + std::strerror(errno) + ")",
        {}, "give this job another MASTER_PORT, or end the other one");
  checked(::listen(listener.get(), 512), "listen");
  return listener;
}

/// Rank 0 at its door. Whoever has come in is asked for its Hello among all others, so that nobody
/// who stays silent holds them up.
class Reception {
 public:
  Reception(const Invitation& me, const Hello& mine, Deadline deadline)
      : interrupted_(me.interrupted),
        mine_(mine),
        deadline_(deadline),
        listener_(listen_for(me.job)),
        ranks_(me.ranks_here()),
        seats_(ranks_.size()) {
    seats_[0].hello = mine;
  }

  /// Until every seat is taken.
  void seat_all() {
    while (taken_ < seats_.size()) wait_and_look();
    listener_ = Fd();
  }

  /// Hands everybody the segment, and what each is, doorbells and processes too, by rank.
  void welcome_all(const Segment& segment, const std::vector<Seat>& members,
                   const std::vector<int>& fds, const std::string& hand_out) {
    Answer yes{};
    yes.accepted = 1;
    copy_cut(hand_out, yes.text);
    const int memory = segment.fd();
    const Deadline patience{std::max(deadline_.at, now() + kGrace)};
    for (size_t r = 1; r < seats_.size(); ++r) {
      const int to = seats_[r].socket.get();
      bool there = send_patiently(to, &yes, sizeof yes, {&memory, 1}, patience, interrupted_);
      for (size_t i = 0; there && i < members.size(); i += kSeatsAtOnce) {
        const size_t n = std::min(kSeatsAtOnce, members.size() - i);
        there = send_patiently(to, members.data() + i, n * sizeof(Seat),
                               {fds.data() + 2 * i, 2 * n}, patience, interrupted_);
      }
    }
  }

  /// Until everybody has said that it has all it needs; then everybody is told.
  void confirm_all() {
    const Deadline patience{std::max(deadline_.at, now() + kGrace)};
    std::vector<bool> ready(seats_.size());
    ready[0] = true;
    while (std::find(ready.begin(), ready.end(), false) != ready.end()) {
      std::vector<pollfd> fds;
      for (size_t r = 0; r < seats_.size(); ++r)
        fds.push_back({ready[r] ? -1 : seats_[r].socket.get(), POLLIN, 0});
      if (!readable(fds, patience, interrupted_))
        throw Error(ErrorCode::rendezvous, "not all ranks took their seats in time");
      for (size_t r = 0; r < seats_.size(); ++r)
        if (fds[r].revents != 0) ready[r] = says_yes(seats_[r]);
    }
    Answer yes{};
    yes.accepted = 1;
    for (const Guest& g : seats_)
      if (g.socket) send_message(g.socket.get(), &yes, sizeof yes);
  }

  /// Everybody who has come hears of the error, those at the door and who comes within `linger`.
  void refuse_all(const Error& error, Duration linger) {
    const Deadline until = Deadline::after(linger);
    size_t untold = seats_.size() - 1;
    const auto tell = [&](const Fd& socket) {
      if (socket && send_refusal(socket.get(), error) && untold > 0) --untold;
    };
    // Who is refused and dials again at once meets another meeting.
    if (linger == Duration::zero()) ::shutdown(listener_.get(), SHUT_RDWR);
    for (const Guest& g : std::exchange(seats_, {})) tell(g.socket);
    for (const Arrival& a : std::exchange(arrivals_, {})) tell(a.socket);
    // Only now, since descriptors may be what is lacking. Behind a shut door nobody is waited for.
    while ((untold > 0 || linger == Duration::zero()) &&
           readable(listener_.get(), until, interrupted_)) {
      const Fd late(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      if (!late) break;
      if (!same_user(late.get())) continue;
      send_message(late.get(), &kGreeting, sizeof kGreeting);
      tell(late);
    }
    listener_.reset();
  }

  std::vector<Guest>& seats() { return seats_; }

 private:
  struct Arrival {
    Fd socket;
    TimePoint until;  // then it will not say hello any more
  };
  static constexpr auto kPolite = std::chrono::seconds(5);
  static constexpr auto kGrace = std::chrono::seconds(2);

  void wait_and_look() {
    std::vector<pollfd> fds{{listener_.get(), POLLIN, 0}};
    for (const Guest& g : seats_) fds.push_back({g.socket.get(), POLLIN, 0});
    for (const Arrival& a : arrivals_) fds.push_back({a.socket.get(), POLLIN, 0});
    const Deadline next =
        arrivals_.empty() ? deadline_ : Deadline{std::min(deadline_.at, arrivals_.front().until)};
    readable(fds, next, interrupted_);
    for (size_t r = 0; r < seats_.size(); ++r)
      if (fds[r + 1].revents != 0) throw left(seats_[r].hello);
    std::vector<Arrival> old = std::exchange(arrivals_, {});
    std::vector<Arrival> heard;
    for (size_t i = 0; i < old.size(); ++i) {
      if (fds[1 + seats_.size() + i].revents != 0)
        heard.push_back(std::move(old[i]));
      else if (now() < old[i].until)
        arrivals_.push_back(std::move(old[i]));
    }
    hear_all(std::move(heard));
    if (fds[0].revents != 0) let_in();
    if (taken_ < seats_.size() && deadline_.passed(now())) throw missing(seats_, ranks_);
  }

  void let_in() {
    Fd socket(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
    if (!socket && errno != EINTR && errno != ECONNABORTED) throw_errno("accepting a rank");
    if (!socket || !same_user(socket.get())) return;  // a stranger is dropped silently
    send_message(socket.get(), &kGreeting, sizeof kGreeting);
    arrivals_.push_back({std::move(socket), now() + kPolite});
  }

  void hear_all(std::vector<Arrival> guests) {
    try {
      for (Arrival& guest : guests) take(guest);
    } catch (const Error&) {
      for (Arrival& guest : guests)  // they are told with all others
        if (guest.socket) arrivals_.push_back(std::move(guest));
      throw;
    }
  }

  void take(Arrival& guest) {
    Hello hello{};
    std::vector<Fd> fds;
    if (!receive_message(guest.socket.get(), &hello, sizeof hello, &fds)) return;
    if (hello.trouble[0] == 0 && fds.size() != 2) return;
    if (const auto why = objection(mine_, hello, seats_, ranks_)) throw *why;
    seats_[*seat_of(hello.rank, ranks_)] = {std::move(guest.socket), hello, std::move(fds[0]),
                                            std::move(fds[1])};
    ++taken_;
  }

  static bool says_yes(const Guest& guest) {
    Answer answer{};
    if (!receive_message(guest.socket.get(), &answer, sizeof answer)) throw left(guest.hello);
    if (answer.accepted == 0) throw refusal_in(answer);
    return true;
  }

  const std::function<void()>& interrupted_;
  const Hello& mine_;
  const Deadline deadline_;
  Fd listener_;
  const std::vector<int> ranks_;  // of this host, as the seats
  std::vector<Guest> seats_;
  std::vector<Arrival> arrivals_;  // in the order they came
  size_t taken_ = 1;               // the holder's own is never empty
};

Host hold(Reception& reception, const Invitation& me) {
  reception.seat_all();
  std::vector<Guest>& seats = reception.seats();
  seats[0].doorbell = make_event_fd();
  seats[0].process = own_process();
  const auto secret = me.others ? std::optional(me.others->secret) : std::nullopt;
  const auto segment = Segment::create(me.size, me.arena_bytes, secret);
  std::vector<Seat> members;
  std::vector<int> shown;
  for (const Guest& g : seats) {
    members.push_back(seat_from(g.hello));
    shown.insert(shown.end(), {g.doorbell.get(), g.process.get()});
  }
  reception.welcome_all(*segment, members, shown, me.hand_out);
  reception.confirm_all();
  std::vector<Fd> fds;
  for (Guest& g : seats) {
    fds.push_back(std::move(g.doorbell));
    fds.push_back(std::move(g.process));
  }
  return seated(me, segment, members, std::move(fds), me.hand_out);
}

/// Rank 0 lacks something itself: nobody has been named yet.
bool is_its_own(const Error& error) {
  return error.code() == ErrorCode::resource && error.where().rank < 0;
}

}  // namespace

Host receive_all(const Invitation& me, Deadline deadline) {
  const Hello mine = hello_from(me);
  Reception reception(me, mine, deadline);
  try {
    return hold(reception, me);
  } catch (const Error& error) {
    const bool own = is_its_own(error);
    const Error told = own ? as_told(mine, error) : error;
    reception.refuse_all(told, own ? kLinger : Duration::zero());
    throw told;
  }
}

}  // namespace farandole
