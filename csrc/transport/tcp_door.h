// Makes a rank's TCP connections. A thread accepts and dials, and both ends prove who they are, so
// a silent client never holds up the thread that polls the engine. That thread asks for a lane and
// looks whether it has come.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <vector>

#include "base/clock.h"
#include "base/error.h"
#include "transport/segment.h"
#include "transport/tcp_address.h"
#include "transport/tcp_links.h"
#include "transport/tcp_talk.h"

namespace farandole {

/// A lane that was asked for.
struct TcpArrival {
  std::atomic<bool> here{false};  // released after the rest
  TcpConnection connection;
  std::optional<Error> error;        // it will not come
  std::shared_ptr<const Fd> wake{};  // of one that was there before: rung instead of news()
};

/// By rank: the addresses where it listens, one after the other (TcpAddress::all_from).
using TcpAddresses = std::vector<std::vector<std::byte>>;

class TcpDoor {
 public:
  static constexpr size_t kMostHalfOpen = 256;    // of those that have proved nothing
  static constexpr size_t kMostUnclaimed = 1024;  // lanes that nobody here has asked for yet
  static constexpr Duration kPolite = std::chrono::seconds(5);  // then a stranger is dropped

  /// Listens on loopback and shows the address in the rank's page. `family`: 4 or 6 alone.
  TcpDoor(std::shared_ptr<Segment> segment, int rank, std::optional<int> family = std::nullopt);
  /// For ranks that know each other's addresses. `listeners` listen already, at this rank's own.
  TcpDoor(std::shared_ptr<Segment> segment, int rank, std::vector<Fd> listeners,
          TcpAddresses of_ranks);
  ~TcpDoor();
  TcpDoor(const TcpDoor&) = delete;
  TcpDoor& operator=(const TcpDoor&) = delete;

  /// Any thread; each lane once.
  std::shared_ptr<TcpArrival> await(const TcpLane& lane);
  /// The next connection of a lane that had one. The dialer tries each address once.
  std::shared_ptr<TcpArrival> await_again(const TcpLane& lane, std::shared_ptr<const Fd> wake);
  /// An eventfd that is rung when a lane has come.
  int news() const { return news_.get(); }
  /// Where this rank listens.
  const std::vector<std::byte>& addresses() const { return addresses_; }
  /// Where another rank listens, as ranks told each other; on one host, as it has shown it by now.
  std::vector<std::byte> addresses_of(int rank) const;
  /// The connections for data.
  TcpLinks& links() { return links_; }
  /// Closes the parent's descriptors in a forked child.
  void close_descriptors();

 private:
  /// Attempts to reach a higher rank, at one of its addresses after the other, while that may help.
  struct Dial {
    TcpLane lane;
    std::weak_ptr<TcpArrival> arrival;
    size_t tries = 0, at = 0;         // which of its addresses
    std::vector<std::string> whys{};  // by address: how it went there last
    std::optional<Error> refusal{};   // of who was at one of them
    TimePoint next{};
    Duration pause{};
    Deadline give_up{};
  };
  struct Visitor {
    TcpTalk talk;
    std::optional<Dial> dial;  // none: it has come to us
    Deadline until;
  };

  std::shared_ptr<TcpArrival> ask_for(const TcpLane& lane, std::shared_ptr<TcpArrival> arrival);
  void main();
  void look(int timeout_ms);
  int time_to_next() const;
  void let_in(int listener);
  void make_room();
  void take_dials();
  void dial_due();
  void begin(Dial dial);
  void give_up(const Dial& dial, const Error& error);
  void wait_for(Dial dial);
  void try_again(Dial dial, const std::string& why);
  void take_refusal(Dial dial, const Error& refusal);
  void add(Visitor visitor);
  void advance(int socket);
  void drop_impolite();
  void look_after_dials(TimePoint when);
  void settle(Visitor visitor, TcpTalk::State state);
  void deliver(const TcpLane& lane, TcpConnection connection);
  void deliver(const TcpLane& lane, const Error& refusal);
  void keep_unclaimed(const TcpLane& lane, TcpConnection connection);
  void arrived(TcpArrival& arrival);
  void note_stranger(const std::string& why);
  bool note_is_due();
  Error of_this_rank(const Error& error) const;
  void refuse_awaited(const Error& error);

  std::shared_ptr<Segment> segment_;
  const int rank_;
  std::vector<Fd> listeners_;
  const TcpAddresses of_ranks_;  // by rank; empty: each shows its own in the segment
  Fd epoll_, wake_, news_;
  std::vector<std::byte> addresses_;
  TcpLinks links_;

  // The thread's; a forked child looks whether it was in the middle of something.
  std::mutex working_;
  std::map<int, Visitor> visitors_;  // by socket
  std::vector<Dial> dials_;          // to be begun
  std::map<int, size_t> reached_;    // by rank: which address led to it last
  std::optional<TimePoint> accept_again_;
  TimePoint next_note_{};

  std::mutex mutex_;  // guards these
  std::vector<Dial> new_dials_;
  std::map<TcpLane, std::weak_ptr<TcpArrival>> awaited_;
  std::map<TcpLane, TcpConnection> unclaimed_;
  std::map<TcpLane, Error> refused_;  // nobody here has asked for these yet, either

  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: all else is there
};

}  // namespace farandole
