#include <atomic>
#include <mutex>
#include <span>
#include <string>
#include <vector>

#include "base/wire.h"
#include "check.h"
#include "control/control_messages.h"
#include "control/failure_detector.h"
#include "world.h"

using namespace farandole;

namespace {

Error report_of(int rank) {
  Context where;
  where.rank = rank;
  where.host = "host " + std::to_string(rank);
  where.operation = "all_reduce #" + std::to_string(rank);
  where.evidence = std::string(static_cast<size_t>(100 + rank), static_cast<char>('a' + rank));
  where.values = {{"missing", {rank, rank + 1}}};
  return Error(ErrorCode::stalled, "seen by rank " + std::to_string(rank), where, "advice");
}

}  // namespace

TEST(failure_detector_makes_one_verdict_of_many_reports) {
  constexpr int kRanks = 6;
  for (int round = 0; round < 200; ++round) {
    FailureRecord cell;
    std::mutex mutex;
    std::vector<std::string> verdicts;
    std::atomic<int> ready{0};
    testing::run_ranks(kRanks, [&](int rank) {
      HostFailureDetector detector(cell);
      ++ready;
      while (ready.load() < kRanks) std::this_thread::yield();
      if (rank % 2 == 0) detector.report(report_of(rank));
      std::optional<Error> verdict;
      while (!(verdict = detector.verdict())) std::this_thread::yield();
      CHECK(detector.failed());
      CHECK_EQUAL(verdict->where().host, "host " + std::to_string(verdict->where().rank));
      const std::lock_guard lock(mutex);
      verdicts.emplace_back(verdict->what());
    });
    for (const std::string& verdict : verdicts) CHECK_EQUAL(verdict, verdicts.front());
  }
}

TEST(failure_records_survive_the_way_through_shared_memory) {
  const Error error = report_of(3);
  const Error copy = decode(encode(error));
  CHECK_EQUAL(std::string(copy.what()), std::string(error.what()));
  CHECK(copy.code() == error.code());
  CHECK_EQUAL(copy.where().rank, 3);
  CHECK_EQUAL(copy.where().host, error.where().host);
  CHECK(copy.where().values == error.where().values);
}

TEST(failure_records_travel_to_other_hosts_field_by_field) {
  Context where;
  where.rank = 1;
  where.peer = 2;
  where.pid = 3;
  where.signal = 9;
  where.host = "b";
  where.operation = "all_reduce #7";
  where.tensor = "weights";
  where.sequence = 1ULL << 40;
  where.lane = 5;
  where.step = 6;
  where.bytes_done = 7;
  where.bytes_total = 1ULL << 33;
  where.field = "count";
  where.evidence = "seen";
  where.values = {{"10", {0, 2}}, {"11", {1}}};
  const ErrorRecord record = encode(Error(ErrorCode::mismatch, "they differ", where, "look"));
  WireWriter to;
  put_message(to, record);
  CHECK(to.size() < 300U);  // texts alone, and not the room for them
  const std::vector<std::byte> bytes = to.take();
  WireReader from(bytes);
  const Error error = decode(get_message<ErrorRecord>(from));
  CHECK(from.done());
  CHECK(error.code() == ErrorCode::mismatch);
  CHECK_EQUAL(std::string(error.what()), std::string(decode(record).what()));
  CHECK_EQUAL(error.advice(), "look");
  const Context& got = error.where();
  CHECK_EQUAL(got.rank, 1);
  CHECK_EQUAL(got.peer, 2);
  CHECK_EQUAL(got.pid, 3);
  CHECK_EQUAL(got.signal, 9);
  CHECK_EQUAL(got.host, "b");
  CHECK_EQUAL(got.operation, where.operation);
  CHECK_EQUAL(got.tensor, "weights");
  CHECK_EQUAL(got.sequence, where.sequence);
  CHECK_EQUAL(got.lane, 5);
  CHECK_EQUAL(got.step, 6);
  CHECK_EQUAL(got.bytes_done, 7U);
  CHECK_EQUAL(got.bytes_total, where.bytes_total);
  CHECK_EQUAL(got.field, "count");
  CHECK_EQUAL(got.evidence, "seen");
  CHECK(got.values == where.values);
  for (size_t cut = 0; cut < bytes.size(); ++cut) {
    WireReader torn{std::span(bytes).first(cut)};
    CHECK_THROWS(get_message<ErrorRecord>(torn), Error, e.code() == ErrorCode::link);
  }
}

TEST(failure_records_cut_long_texts_between_characters_and_lists_between_items) {
  Context where;
  for (int i = 0; i < 200; ++i) where.tensor += "\u00e9";  // two bytes each; 192 fit less one
  for (int i = 0; i < 100; ++i) where.values.push_back({"value " + std::to_string(i), {100 + i}});
  const Error copy = decode(encode(Error(ErrorCode::mismatch, "verdict", where)));
  CHECK_EQUAL(copy.where().tensor.size(), 190U);
  CHECK(!copy.where().values.empty() && copy.where().values.size() < 100);
  for (size_t i = 0; i < copy.where().values.size(); ++i)
    CHECK(copy.where().values[i] == where.values[i]);
}
