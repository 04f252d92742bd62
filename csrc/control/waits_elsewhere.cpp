#include "control/waits_elsewhere.h"

#include <cstring>
#include <utility>
#include <vector>

#include "control/control_messages.h"

namespace farandole {
namespace {

template <typename Record>
std::vector<uint64_t> words_in(const Record& record) {
  return record.read().value_or(std::vector<uint64_t>());
}

/// `Head`: the first of the words. Nothing: the rank has never shown them.
template <typename Head, typename Record>
void take_record(std::vector<uint64_t> words, Duration earliest, Duration latest, Record& record) {
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
  put_message(to, BoardWords{nanoseconds_now(), words_in(mine.waits), words_in(mine.threads)});
}

void take_waits(WireReader& from, TimePoint asked, WaitBoard& theirs) {
  auto words = get_message<BoardWords>(from);
  const Duration there(words.there);
  const Duration earliest = asked.time_since_epoch() - there;
  const Duration latest = now().time_since_epoch() - there;
  take_record<WaitHead>(std::move(words.waits), earliest, latest, theirs.waits);
  take_record<ThreadReport>(std::move(words.threads), earliest, latest, theirs.threads);
}

}  // namespace farandole
