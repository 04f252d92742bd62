// Where a rank's TCP connections are made: a thread accepts and dials, and both ends prove who they
// are, so that nobody who connects and says nothing holds up who polls. Who polls asks for a lane
// and looks whether it has come.
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
#include "transport/segment.h"
#include "transport/tcp_address.h"
#include "transport/tcp_talk.h"

namespace farandole {

/// A lane that was asked for.
struct TcpArrival {
  std::atomic<bool> here{false};  // released after the rest
  Fd socket;
  std::optional<Error> error;  // it will not come
};

class TcpDoor {
 public:
  static constexpr size_t kMostHalfOpen = 256;    // of those that have proved nothing
  static constexpr size_t kMostUnclaimed = 1024;  // lanes that nobody here has asked for yet
  static constexpr Duration kPolite = std::chrono::seconds(5);  // then a stranger is dropped

  /// Listens on loopback and shows the address in the rank's page. `family`: 4 or 6 alone.
  TcpDoor(std::shared_ptr<Segment> segment, int rank, std::optional<int> family = std::nullopt);
  /// The same, where `listener` listens already.
  TcpDoor(std::shared_ptr<Segment> segment, int rank, Fd listener);
  ~TcpDoor();
  TcpDoor(const TcpDoor&) = delete;
  TcpDoor& operator=(const TcpDoor&) = delete;

  /// Any thread; each lane once.
  std::shared_ptr<TcpArrival> await(const TcpLane& lane);
  /// An eventfd that is rung when a lane has come.
  int news() const { return news_.get(); }
  const TcpAddress& address() const { return address_; }
  /// In a forked child: what is its parent's is closed.
  void close_descriptors();

 private:
  /// An attempt to reach a higher rank, repeated while that may help.
  struct Dial {
    TcpLane lane;
    std::weak_ptr<TcpArrival> arrival;
    TimePoint next{};
    Duration pause{};
    Deadline give_up{};
  };
  struct Visitor {
    TcpTalk talk;
    std::optional<Dial> dial;  // none: it has come to us
    Deadline until;
  };

  void main();
  void look(int timeout_ms);
  int time_to_next() const;
  void let_in();
  void make_room();
  void take_dials();
  void dial_due();
  void begin(Dial dial);
  void give_up(const Dial& dial, const Error& error);
  void try_again(Dial dial, const std::string& why);
  void add(Visitor visitor);
  void advance(int socket);
  void drop_impolite();
  void settle(Visitor visitor, TcpTalk::State state);
  void deliver(const TcpLane& lane, Fd socket);
  void keep_unclaimed(const TcpLane& lane, Fd socket);
  void arrived(TcpArrival& arrival);
  void note_stranger(const std::string& why);

  std::shared_ptr<Segment> segment_;
  const int rank_;
  Fd listener_, epoll_, wake_, news_;
  TcpAddress address_;

  // The thread's; a forked child looks whether it was in the middle of something.
  std::mutex working_;
  std::map<int, Visitor> visitors_;  // by socket
  std::vector<Dial> dials_;          // to be begun
  std::optional<TimePoint> accept_again_;
  TimePoint next_note_{};

  std::mutex mutex_;  // guards these
  std::vector<Dial> new_dials_;
  std::map<TcpLane, std::weak_ptr<TcpArrival>> awaited_;
  std::map<TcpLane, Fd> unclaimed_;

  std::atomic<bool> stopping_{false};
  std::thread thread_;  // last: all else is there
};

}  // namespace farandole
