#include "control/waits_elsewhere.h"

#include <cstring>
#include <span>
#include <vector>

namespace farandole {
namespace {

template <typename Record>
void put_record(WireWriter& to, const Record& record) {
  const auto words = record.read();
  to.put_list(std::span<const uint64_t>(words ? *words : std::vector<uint64_t>()));
}

/// `Head`: what the words begin with. Nothing: the rank has never shown them.
template <typename Head, typename Record>
void take_record(WireReader& from, Duration earliest, Duration latest, Record& record) {
  std::vector<uint64_t> words = from.get_list<uint64_t>(Record::kWords);
  if (words.size() * sizeof(uint64_t) < sizeof(Head)) return;
  Head head;
  std::memcpy(static_cast<void*>(&head), words.data(), sizeof head);
  head.looked += earliest.count();
  head.still_since += latest.count();
  std::memcpy(words.data(), &head, sizeof head);
  record.write(words);
}

}  // namespace

void put_waits(WireWriter& to, const WaitBoard& mine) {
  to.put(nanoseconds_now());
  put_record(to, mine.waits);
  put_record(to, mine.threads);
}

void take_waits(WireReader& from, TimePoint asked, WaitBoard& theirs) {
  const Duration there(from.get<int64_t>());
  const Duration earliest = asked.time_since_epoch() - there;
  const Duration latest = now().time_since_epoch() - there;
  take_record<WaitHead>(from, earliest, latest, theirs.waits);
  take_record<ThreadReport>(from, earliest, latest, theirs.threads);
}

}  // namespace farandole
