#include "control/wait_watch.h"

#include <linux/futex.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <climits>
#include <cstring>
#include <span>

#include "base/fixed_text.h"
#include "base/hash.h"
#include "control/control_mesh.h"
#include "control/failure_detector.h"

namespace farandole {
namespace {

constexpr auto kBetweenLooks = std::chrono::milliseconds(50);
constexpr auto kQuiet = std::chrono::milliseconds(100);  // most operations end before it
constexpr auto kFresh = std::chrono::seconds(3);         // watches look at least once a second
constexpr Duration kLeastPatience = std::chrono::milliseconds(300);
constexpr Duration kLeastPatienceBetweenHosts = std::chrono::seconds(3);
constexpr size_t kMostAsked = 64;  // ranks, at a time
constexpr Duration kMostPatience = std::chrono::seconds(90);
constexpr int kDaemonFactor = 6;  // a thread of unknown purpose gets so many times the patience

int64_t stamp(TimePoint when) { return when.time_since_epoch().count(); }
TimePoint from_stamp(int64_t ns) { return TimePoint(Duration(ns)); }

template <typename T>
std::span<const uint64_t> words_of(const T& value) {
  return {reinterpret_cast<const uint64_t*>(&value), sizeof value / sizeof(uint64_t)};
}

template <typename T>
bool take_words(std::span<const uint64_t>& from, T& value) {
  constexpr size_t kWords = sizeof(T) / sizeof(uint64_t);
  if (from.size() < kWords) return false;
  std::memcpy(static_cast<void*>(&value), from.data(), sizeof value);
  from = from.subspan(kWords);
  return true;
}

uint64_t hash_of(const WaitList& list) {
  Hash hash;
  hash.add(list.begun);
  for (const Wait& wait : list.waits) {
    hash.add(wait.key);
    hash.add(wait.sequence);
    hash.add(uint64_t{wait.kind} << 32 | wait.count);
    for (const uint16_t r : wait.needed()) hash.add(uint64_t{r});
  }
  return hash.value();
}

}  // namespace

void WaitList::add(const Wait& wait, const std::string& title) {
  waits.push_back(wait);
  if (wait.kind != Wait::moving && titles.size() < kMostTitles) titles.push_back(title);
}

WaitWatch::WaitWatch(const Host& host, Duration warn_after)
    : host_(host),
      patience_(std::clamp<Duration>(warn_after + warn_after / 2,
                                     host.mesh ? kLeastPatienceBetweenHosts : kLeastPatience,
                                     kMostPatience)) {}

// ---- what this rank shows ----

bool WaitWatch::due(TimePoint when, uint64_t ended) {
  if (ended != ended_) {
    ended_ = ended;
    next_look_ = when + kQuiet;
  }
  if (when < next_look_) return false;
  next_look_ = when + kBetweenLooks;
  return true;
}

std::optional<Error> WaitWatch::look(TimePoint when, const WaitList& list) {
  if (list.waits.empty() && !shows_) return std::nullopt;
  shows_ = !list.waits.empty();
  const uint64_t hash = hash_of(list) ^ ended_ << 32;
  if (hash != shown_hash_ || still_since_ == TimePoint{}) still_since_ = when;
  shown_hash_ = hash;
  show(when, list);
  if (!shows_ || when - still_since_ < patience_ / 8) return std::nullopt;
  ask(when, list);
  if (auto verdict = take_verdict()) return verdict;
  return confirm(when);
}

void WaitWatch::show(TimePoint when, const WaitList& list) {
  WaitHead head;
  head.looked = stamp(when);
  head.still_since = head.stands = stamp(still_since_);
  head.complete = list.waits.size() <= kMostWaits ? 1 : 0;
  head.titles = std::min(list.titles.size(), kMostTitles);
  head.waits = std::min(list.waits.size(), kMostWaits);
  std::vector<uint64_t> words;
  const auto put = [&](const auto& value) {
    const auto more = words_of(value);
    words.insert(words.end(), more.begin(), more.end());
  };
  put(head);
  for (size_t i = 0; i < head.titles; ++i) {
    WaitTitle title;
    copy_cut(list.titles[i], title.text);
    put(title);
  }
  for (size_t i = 0; i < head.waits; ++i) put(list.waits[i]);
  host_.segment->page(host_.rank).board.waits.write(words);
}

/// Asks the watches of this rank, and of the ranks it needs, to look at their threads.
void WaitWatch::ask(TimePoint when, const WaitList& list) {
  if (when < next_ask_) return;
  next_ask_ = when + std::clamp<Duration>(patience_ / 8, std::chrono::milliseconds(50),
                                          std::chrono::seconds(1));
  for (const int r : concerned_by(list)) {
    if (host_.is_here(r))
      ask_watch(host_.segment->page(r).board);
    else
      host_.mesh->ask_waits(r);
  }
}

/// This rank, the ranks it needs and, on several hosts, those that they need in turn: ranks
/// elsewhere show nothing unasked.
std::vector<int> WaitWatch::concerned_by(const WaitList& list) const {
  std::vector<int> ranks{host_.rank};
  const auto add = [&](const std::vector<Wait>& waits) {
    for (const Wait& wait : waits)
      for (const int r : wait.needed())
        if (std::ranges::find(ranks, r) == ranks.end()) ranks.push_back(r);
  };
  add(list.waits);
  for (size_t i = 1; host_.mesh && i < ranks.size() && ranks.size() < kMostAsked; ++i)
    if (const auto shown = shown_by(ranks[i])) add(shown->waits);
  return ranks;
}

// ---- what others show ----

std::optional<RankWaits> WaitWatch::shown_by(int world_rank) const {
  const WaitBoard& board = host_.segment->page(world_rank).board;
  RankWaits rank;
  const TimePoint when = now();
  const auto is_fresh = [&](TimePoint looked) { return when - looked <= kFresh; };
  if (const auto words = board.threads.read()) {
    ThreadReport report;
    std::span<const uint64_t> from = *words;
    if (take_words(from, report) && is_fresh(from_stamp(report.looked))) {
      rank.threads_looked = from_stamp(report.looked);
      rank.threads_still_since = from_stamp(report.still_since);
      rank.threads_stand = report.stands;
      rank.threads = static_cast<ThreadReport::State>(report.state);
      rank.place = text_in(report.place);
      rank.step = text_in(report.step);
    }
  }
  if (const auto words = board.waits.read()) {
    WaitHead head;
    std::span<const uint64_t> from = *words;
    if (take_words(from, head) && is_fresh(from_stamp(head.looked))) {
      rank.looked = from_stamp(head.looked);
      rank.still_since = from_stamp(head.still_since);
      rank.stands = head.stands;
      rank.complete = head.complete == 1;
      WaitTitle title;
      for (uint64_t i = 0; i < head.titles && take_words(from, title); ++i)
        rank.titles.push_back(text_in(title.text));
      Wait wait;
      for (uint64_t i = 0; i < head.waits && take_words(from, wait); ++i) {
        rank.waits.push_back(wait);
      }
    }
  }
  if (rank.looked == TimePoint{} && rank.threads_looked == TimePoint{}) return std::nullopt;
  return rank;
}

std::vector<bool> WaitWatch::gone_ranks() const {
  std::vector<bool> gone;
  for (int r = 0; r < host_.size(); ++r)
    gone.push_back(host_.segment->state_of(r) >= RankState::leaving);
  return gone;
}

RanksWaits WaitWatch::blocked_ranks(TimePoint when, Duration patience) const {
  RanksWaits ranks(static_cast<size_t>(host_.size()));
  for (int r = 0; r < host_.size(); ++r) {
    if (host_.segment->state_of(r) != RankState::present) continue;
    std::optional<RankWaits> rank = shown_by(r);
    if (!rank || rank->looked == TimePoint{} || rank->threads == ThreadReport::free) continue;
    const Duration needed =
        rank->threads == ThreadReport::daemonic ? kDaemonFactor * patience : patience;
    const bool blocked =
        when - rank->still_since >= needed && when - rank->threads_still_since >= needed / 2;
    if (blocked) ranks[static_cast<size_t>(r)] = std::move(rank);
  }
  return ranks;
}

namespace {

struct VerdictWords {
  int64_t stands;
  ErrorRecord record;
};
static_assert(sizeof(VerdictWords) <= SentVerdict::kWords * 8 && sizeof(VerdictWords) % 8 == 0);

}  // namespace

void put_verdict(WaitBoard& board, const ErrorRecord& record, int64_t stands) {
  SentVerdict& to = board.verdict;
  uint64_t none = 0;
  if (!to.state.compare_exchange_strong(none, 1)) return;  // it has one already
  to.words.write(words_of(VerdictWords{stands, record}));
  to.state.store(2, std::memory_order_release);  // partner: take_verdict
}

void WaitWatch::send_verdict(int world_rank, const Error& error, int64_t stands) const {
  if (host_.is_here(world_rank))
    put_verdict(host_.segment->page(world_rank).board, encode(error), stands);
  else
    host_.mesh->tell_deadlock(world_rank, encode(error), stands);
}

std::optional<Error> WaitWatch::confirm(TimePoint when) {
  const auto ranks = blocked_ranks(when, patience_);
  const std::vector<int> circle = circle_of(host_.rank, ranks, gone_ranks());
  std::vector<Stand> stands;
  bool anew = true;
  for (const int r : circle) {
    const RankWaits& rank = *ranks[static_cast<size_t>(r)];
    stands.push_back({r, rank.stands, rank.threads_stand});
    anew &= rank.looked > seen_ && rank.threads_looked > seen_;
  }
  if (circle.empty() || stands != seen_circle_) {
    seen_circle_ = std::move(stands);
    seen_ = when;
    return std::nullopt;
  }
  if (!anew || circle.front() != host_.rank) return std::nullopt;
  Error error = deadlock_of(circle, ranks, when);
  for (const int r : circle)
    if (r != host_.rank) send_verdict(r, error, ranks[static_cast<size_t>(r)]->stands);
  return error;
}

/// Takes a deadlock that another rank has found, if this one has not moved since.
std::optional<Error> WaitWatch::take_verdict() {
  SentVerdict& sent = host_.segment->page(host_.rank).board.verdict;
  if (sent.state.load(std::memory_order_acquire) != 2) return std::nullopt;
  VerdictWords verdict{};
  std::optional<Error> error;
  if (const auto words = sent.words.read()) {
    std::span<const uint64_t> from = *words;
    if (take_words(from, verdict) && verdict.stands == stamp(still_since_))
      error = decode(verdict.record);
  }
  sent.state.store(0, std::memory_order_release);
  return error;
}

// ---- words ----

std::string WaitWatch::doing(int world_rank, std::string_view link) const {
  const std::optional<RankWaits> rank = shown_by(world_rank);
  if (!rank) return "";
  RanksWaits ranks(static_cast<size_t>(host_.size()));
  for (int r = 0; r < host_.size(); ++r) ranks[static_cast<size_t>(r)] = shown_by(r);
  std::string text = waits_text(*rank, ranks);
  if (!rank->step.empty()) text = rank->step + (text.empty() ? "" : " and " + text);
  if (!rank->place.empty()) text += (text.empty() ? "is at " : ", at ") + rank->place;
  return text.empty() ? text : std::string(link) + text;
}

std::string WaitWatch::suspicion(TimePoint when) const {
  const auto ranks = blocked_ranks(when, patience_ / 4);
  const std::vector<int> circle = circle_of(host_.rank, ranks, gone_ranks());
  if (circle.empty()) return "";
  return "; this looks like a deadlock: " + story_of(circle, ranks);
}

// ---- the watch of this rank ----

bool await_question(WaitBoard& board, uint32_t& heard) {
  for (;;) {
    if (board.over.load() != 0) return false;
    const uint32_t asked = board.asked.load();  // seq_cst; partner: ask_watch
    if (asked != heard) {
      heard = asked;
      return board.over.load() == 0;
    }
    ::syscall(SYS_futex, &board.asked, FUTEX_WAIT, asked, nullptr, nullptr, 0);
  }
}

void ask_watch(WaitBoard& board) {
  board.asked.fetch_add(1);  // seq_cst; partner: await_question
  ::syscall(SYS_futex, &board.asked, FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void end_questions(WaitBoard& board) {
  board.over.store(1);
  ask_watch(board);
}

void show_threads(WaitBoard& board, ThreadReport report) {
  report.stands = report.still_since;
  board.threads.write(words_of(report));
}

}  // namespace farandole
