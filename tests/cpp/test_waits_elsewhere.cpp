// Wait reports of ranks on other hosts, whose clocks differ.
#include <cstring>
#include <memory>
#include <thread>
#include <vector>

#include "check.h"
#include "control/waits_elsewhere.h"

namespace {

using namespace farandole;

int64_t nanoseconds(TimePoint when) { return when.time_since_epoch().count(); }

template <typename Head, typename Record>
void show(Record& record, const Head& head) {
  std::vector<uint64_t> words(sizeof head / sizeof(uint64_t));
  std::memcpy(words.data(), &head, sizeof head);
  record.write(words);
}

template <typename Head, typename Record>
Head shown(const Record& record) {
  const auto words = record.read();
  CHECK(words.has_value());
  Head head;
  std::memcpy(static_cast<void*>(&head), words->data(), sizeof head);
  return head;
}

/// Rewrites `bytes` as a host whose clock is `ahead` of ours would have written them.
std::vector<std::byte> by_another_clock(std::vector<std::byte> bytes, int64_t ahead) {
  int64_t there = 0;  // the sender's time, with which a message begins
  std::memcpy(&there, bytes.data(), sizeof there);
  there += ahead;
  std::memcpy(bytes.data(), &there, sizeof there);
  return bytes;
}

}  // namespace

TEST(what_a_rank_elsewhere_shows_is_told_by_our_clock_and_never_for_newer) {
  constexpr int64_t kAhead = 5'000'000'000'000;  // an hour and more
  const TimePoint asked = now();
  const int64_t looked = nanoseconds(asked) + 1000, since = looked - 9'000'000'000;
  const auto there = std::make_unique<WaitBoard>();
  const auto here = std::make_unique<WaitBoard>();
  WaitHead head;
  head.looked = looked + kAhead;
  head.still_since = head.stands = since + kAhead;
  show(there->waits, head);
  ThreadReport report;
  report.looked = looked + kAhead;
  report.still_since = report.stands = since + kAhead;
  report.state = ThreadReport::blocked;
  show(there->threads, report);

  WireWriter message;
  put_waits(message, *there);
  std::this_thread::sleep_for(std::chrono::milliseconds(2));  // on its way
  const auto bytes = by_another_clock(message.take(), kAhead);
  WireReader from(bytes);
  take_waits(from, asked, *here);
  const int64_t taken = nanoseconds(now());

  const auto told = shown<WaitHead>(here->waits);
  CHECK(told.looked <= looked && told.looked > looked - (taken - nanoseconds(asked)));
  CHECK(told.still_since >= since + 2'000'000 &&
        told.still_since < since + (taken - nanoseconds(asked)));
  CHECK(told.stands == head.stands);
  const auto threads = shown<ThreadReport>(here->threads);
  CHECK(threads.looked <= looked && threads.still_since >= since);
  CHECK(threads.stands == report.stands && threads.state == ThreadReport::blocked);
}

TEST(a_rank_elsewhere_that_has_shown_nothing_changes_nothing) {
  const auto there = std::make_unique<WaitBoard>();
  const auto here = std::make_unique<WaitBoard>();
  WireWriter message;
  put_waits(message, *there);
  const auto bytes = message.take();
  WireReader from(bytes);
  take_waits(from, now(), *here);
  CHECK(!here->waits.read() && !here->threads.read());
}
