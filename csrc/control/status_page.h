// The counters that a rank shows to whoever looks from outside of the job (python/farandole/_live).
//
// They lie in a file in memory. Other processes of this user find it by its name among this
// process's descriptors, in /proc/PID/fd, and read it whatever this process does: it may hang or be
// stopped, and any launcher may have started it. The page begins with a table of its fields, so
// that readers of any version understand it. Nobody but this process writes.
#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "base/clock.h"
#include "base/error.h"
#include "base/fd.h"
#include "transport/segment.h"

namespace farandole {

struct StatusOwner {
  std::string job;  // the same for all ranks of it
  std::string host;
  int rank = 0;
  int size = 1;
};

enum class WaitKind : uint8_t { for_ranks, for_data };

class StatusPage {
 public:
  /// Where the kernel gives no file, nobody outside can look.
  explicit StatusPage(const StatusOwner& owner);
  ~StatusPage();
  StatusPage(const StatusPage&) = delete;
  StatusPage& operator=(const StatusPage&) = delete;

  // By the thread that polls.
  void show_ended(uint64_t operations, uint64_t bytes);
  void add_wait(WaitKind kind, Duration length);
  void show_wait(TimePoint since, std::string_view title, std::span<const uint16_t> ranks);
  bool shows_wait() const { return shows_wait_; }
  void end_wait();
  void show_verdict(const Error& error);

  // By any thread.
  void count_step(TimePoint end);
  void show_state(RankState state);
  /// A copy, as a reader outside gets it.
  std::string bytes() const;

  /// For a forked child: the page is its parent's.
  void close_descriptor() { file_.reset(); }

 private:
  struct Layout;
  Fd file_;
  Layout* page_;
  bool shows_wait_ = false;
};

}  // namespace farandole
