#include <stdlib.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <thread>

#include "base/error.h"
#include "base/fixed_text.h"
#include "base/trace.h"
#include "base/trace_store.h"
#include "check.h"

using namespace farandole;

namespace {

struct Directory {
  Directory() {
    std::string pattern = (std::filesystem::temp_directory_path() / "trace-XXXXXX").string();
    if (::mkdtemp(pattern.data()) != nullptr) path = pattern;
  }
  ~Directory() { std::filesystem::remove_all(path); }
  std::string path;

  std::vector<std::string> lines() const {
    std::ifstream file(path + "/rank-0.jsonl");
    std::vector<std::string> all;
    for (std::string line; std::getline(file, line);) all.push_back(line);
    return all;
  }
};

TimePoint at(int64_t ns) { return TimePoint(std::chrono::nanoseconds(ns)); }

TraceEvent event(int64_t begin, int64_t end) {
  TraceEvent e;
  e.kind = TraceKind::user;
  e.begin = at(begin);
  e.end = at(end);
  e.bytes = static_cast<uint64_t>(begin);
  copy_cut(std::to_string(begin), e.name);
  return e;
}

/// The digits that follow `field` in a line, without decimal points. Empty if there is no `field`.
std::string digits_after(const std::string& line, const std::string& field) {
  std::string digits;
  const size_t found = line.find(field);
  if (found == std::string::npos) return digits;
  for (size_t i = found + field.size(); i < line.size(); ++i) {
    if (line[i] >= '0' && line[i] <= '9')
      digits += line[i];
    else if (line[i] != '.')
      break;
  }
  return digits;
}

/// A number of the header: the first line.
int64_t header(const std::vector<std::string>& lines, const std::string& field) {
  return std::stoll(digits_after(lines.at(0), "\"" + field + "\":"));
}

/// Counts the lines of user events. All fields of a line must be of one event.
size_t whole_events(const std::vector<std::string>& lines) {
  size_t count = 0;
  for (const std::string& line : lines) {
    if (line.find("\"cat\":\"user\"") == std::string::npos) continue;
    ++count;
    const std::string bytes = digits_after(line, "\"bytes\":");
    CHECK_EQUAL(std::stoll(digits_after(line, "\"ts\":")), std::stoll(bytes));
    CHECK_EQUAL(digits_after(line, "\"name\":\""), bytes);
  }
  return count;
}

}  // namespace

TEST(trace_keeps_the_newest_events_and_counts_the_others) {
  const Directory directory;
  Trace trace({directory.path, 1, 0, 1, "host"});
  constexpr int64_t kExtra = 100;
  constexpr auto kKept = static_cast<int64_t>(Trace::kEventsPerThread);
  for (int64_t i = 1; i <= kKept + kExtra; ++i) trace.record(event(i, i));
  trace.write();
  const auto lines = directory.lines();
  CHECK_EQUAL(whole_events(lines), Trace::kEventsPerThread);
  CHECK_EQUAL(header(lines, "lost"), kExtra);
  CHECK(lines.back().find("\"name\":\"" + std::to_string(kKept + kExtra) + "\"") !=
        std::string::npos);
}

TEST(trace_is_whole_while_threads_go_on_recording) {
  const Directory directory;
  Trace trace({directory.path, 1, 0, 1, "host"});
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&, t] {
      for (int64_t i = 1; !stop.load(std::memory_order_relaxed); ++i)
        trace.record(event(4 * i + t, 4 * i + t));
    });
  for (int i = 0; i < (testing::kThreadSanitizer ? 2 : 5); ++i) {
    trace.write();
    const auto lines = directory.lines();
    CHECK_EQUAL(whole_events(lines), static_cast<size_t>(header(lines, "events")));
  }
  stop = true;
  for (auto& thread : threads) thread.join();
}

TEST(trace_can_be_read_by_others_while_threads_record_and_after) {
  const Directory directory;
  const std::string file = directory.path + "/.rank-0.events";
  const auto read = [&] {
    std::istringstream part(TraceStore(file).part(false));
    std::vector<std::string> lines;
    for (std::string line; std::getline(part, line);) lines.push_back(line);
    CHECK_EQUAL(whole_events(lines), static_cast<size_t>(header(lines, "events")));
    return whole_events(lines);
  };
  Trace trace({directory.path, 1, 0, 1, "host"});
  std::atomic<bool> stop{false};
  std::atomic<size_t> recorded{0};
  std::thread recording([&] {
    for (int64_t i = 1; !stop.load(std::memory_order_relaxed); ++i, ++recorded)
      trace.record(event(i, i));
  });
  while (recorded < Trace::kEventsPerThread) std::this_thread::yield();
  for (int i = 0; i < 3; ++i) read();  // while events are overwritten
  stop = true;
  recording.join();
  CHECK_EQUAL(read(), Trace::kEventsPerThread - 1);  // the oldest may be half overwritten
  trace.close();
  CHECK(!std::filesystem::exists(file));
}

TEST(trace_that_is_closed_records_nothing_whoever_still_holds_it) {
  const Directory directory;
  Trace trace({directory.path, 1, 0, 1, "host"});
  TraceSteps steps("of a test", 7);
  std::atomic<bool> stop{false};
  std::vector<std::thread> threads;
  for (int t = 0; t < 3; ++t)
    threads.emplace_back([&] {
      for (int64_t i = 1; !stop.load(std::memory_order_relaxed); ++i) {
        const TraceSpan span(&trace, TraceKind::user, "span");
        trace.turn(at(i), at(i));
        trace.record(event(i, i));
      }
    });
  steps.open(&trace);
  trace.write();
  trace.close();
  steps.close();
  std::thread([&] { trace.record(event(1, 1)); }).join();  // has no ring yet
  const auto before = directory.lines();
  bool refused = false;
  try {
    trace.write();
  } catch (const Error& error) {
    refused = error.code() == ErrorCode::resource;
  }
  CHECK(refused);
  CHECK(directory.lines() == before);
  stop = true;
  for (auto& thread : threads) thread.join();
}

TEST(trace_that_is_closed_holds_its_head_alone) {
  const Directory directory;
  const auto held = [&] {
    size_t count = 0;
    for (const auto& link : std::filesystem::directory_iterator("/proc/self/fd")) {
      std::error_code gone;  // the descriptor by which the directory is read
      count += std::filesystem::read_symlink(link, gone).native().rfind(directory.path, 0) == 0;
    }
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);)
      count += line.find(directory.path) != std::string::npos;
    return count;
  };
  Trace trace({directory.path, 1, 0, 1, "host"});
  trace.record(event(1, 1));
  CHECK_EQUAL(held(), size_t{2});
  trace.write();
  trace.close();
  CHECK_EQUAL(held(), size_t{1});  // a mapping of a file that is gone
}

TEST(trace_joins_turns_that_follow_each_other_closely) {
  const Directory directory;
  Trace trace({directory.path, 1, 0, 1, "host"});
  trace.turn(at(0), at(1000));
  trace.turn(at(2000), at(3000));      // 1 µs later: the same
  trace.turn(at(103000), at(104000));  // 100 µs later: another
  {
    const TraceSpan span(&trace, TraceKind::user, "between");
    trace.turn(at(104500), at(105000));  // inside another event
  }
  trace.turn(at(105500), at(106000));
  trace.write();
  std::string turns;
  for (const std::string& line : directory.lines()) turns += digits_after(line, "\"turns\":");
  CHECK_EQUAL(turns, std::string("2111"));
}

TEST(trace_loses_the_events_of_too_many_threads_and_says_so) {
  const Directory directory;
  Trace trace({directory.path, 1, 0, 1, "host"});
  constexpr size_t kThreads = Trace::kMostThreads + 3;
  std::atomic<size_t> recorded{0};
  std::vector<std::thread> threads;
  for (size_t t = 0; t < kThreads; ++t)
    threads.emplace_back([&] {
      trace.record(event(1, 1));
      for (++recorded; recorded < kThreads;)  // their numbers stay their own
        std::this_thread::yield();
    });
  for (auto& thread : threads) thread.join();
  trace.write();
  const auto lines = directory.lines();
  CHECK_EQUAL(whole_events(lines), Trace::kMostThreads);
  CHECK_EQUAL(header(lines, "lost"), 3);
}

TEST(trace_cuts_names_between_characters) {
  char room[6];
  const auto cut = [&](std::string_view text) {
    copy_cut(text, room);
    return std::string(room);
  };
  CHECK_EQUAL(cut(""), std::string());
  CHECK_EQUAL(cut("abcde"), std::string("abcde"));
  CHECK_EQUAL(cut("abcdef"), std::string("abcde"));
  CHECK_EQUAL(cut("abcdä"), std::string("abcd"));
  CHECK_EQUAL(cut("abcä"), std::string("abcä"));
  CHECK_EQUAL(cut("\x80\x80\x80\x80\x80\x80"), std::string());  // no UTF-8, yet no harm
}

TEST(trace_into_no_directory_is_an_error) {
  const Directory directory;
  const std::string file = directory.path + "/file";
  std::ofstream(file) << "x";
  for (const std::string& path : {file, file + "/below"}) {
    bool refused = false;
    try {
      const Trace trace({path, 1, 0, 1, "host"});
    } catch (const Error& error) {
      refused = error.code() == ErrorCode::resource;
    }
    CHECK(refused);
  }
  const Trace trace({directory.path + "/a/b/c", 1, 0, 1, "host"});
  CHECK(std::filesystem::is_directory(directory.path + "/a/b/c"));
}

TEST(trace_leaves_out_an_event_that_is_damaged) {
  const Directory directory;
  Trace trace({directory.path, 1, 0, 1, "host"});
  trace.record(event(10, 20));
  trace.record(event(30, 40));
  TraceEvent& damaged = trace.store().events(0)[0];
  damaged.kind = static_cast<TraceKind>(200);
  std::memset(damaged.name, 'x', sizeof damaged.name);  // and no end
  const std::string part = trace.store().part(true);
  CHECK(part.find("xxx") == std::string::npos);
  CHECK(part.find("\"name\":\"30\"") != std::string::npos);
  CHECK(part.find("\"lost\":1") != std::string::npos);
}
