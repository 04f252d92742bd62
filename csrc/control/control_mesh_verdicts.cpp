// A group of several hosts fails: its judge, and the ways to it (Note [Verdict between hosts]).

#include <algorithm>
#include <set>
#include <string>
#include <utility>
#include <vector>

#include "control/control_mesh.h"
#include "control/control_messages.h"

namespace farandole {
namespace {

constexpr auto kMute = std::chrono::seconds(2);  // beats come eight times in that

}  // namespace

// ---- any thread ----

void ControlMesh::adopt(uint64_t key, std::shared_ptr<FailureRecord> cell) {
  const Lock lock(mutex_);
  cells_[key] = std::move(cell);
  deliver(key);
}

void ControlMesh::drop(uint64_t key) {
  const Lock lock(mutex_);
  cells_.erase(key);
  closed_groups_.push_back(key);
  if (closed_groups_.size() > kMostClosed) closed_groups_.pop_front();
}

void ControlMesh::report(uint64_t key, const std::vector<int>& members, const ErrorRecord& record) {
  const Lock lock(mutex_);
  if (verdicts_.contains(key)) return deliver(key);
  take_note(key, {members, record, rank_});
  ring(wake_->get());
}

// ---- the thread ----

void ControlMesh::take_report(int rank, WireReader& from) {
  auto told = get_message<ReportMessage>(from);
  for (const int member : told.members)
    if (member < 0 || member >= static_cast<int>(peers_.size()))
      WireReader::malformed("a group with rank " + std::to_string(member));
  const Lock lock(mutex_);
  if (const auto verdict = verdicts_.find(told.key); verdict != verdicts_.end())
    send(rank, frame_of<VerdictMessage>(told.key, verdict->second));
  else
    take_note(told.key, {std::move(told.members), told.record, told.by});
}

/// Stores a verdict, and passes it on to ranks that do not hear its sender.
void ControlMesh::take_verdict(int rank, WireReader& from) {
  const auto told = get_message<VerdictMessage>(from);
  const Lock lock(mutex_);
  const bool is_new = verdicts_.try_emplace(told.key, told.record).second;
  for (int r = 0; is_new && r < static_cast<int>(peers_.size()); ++r)
    if (r != rank && peer(r).open && !hear_each_other(r, rank))
      send(r, frame_of<VerdictMessage>(told.key, told.record));
  deliver(told.key);
}

void ControlMesh::take_lost_sight(int rank, WireReader& from) {
  const std::vector<int> told = get_message<LostSightMessage>(from).ranks;
  const Lock lock(mutex_);
  peer(rank).out_of_sight = {told.begin(), told.end()};
}

/// Sends reports where their judges are now, and judges those of which this rank is the judge.
void ControlMesh::settle_reports() {
  const Lock lock(mutex_);
  if (reports_.empty()) return;
  const std::vector<int> way = ways();
  for (auto next = reports_.begin(); next != reports_.end();) {
    auto& [key, report] = *next++;  // a report that is judged is no more
    int judge = -1;
    for (const int member : report.members)
      if (way[static_cast<size_t>(member)] >= 0 && (judge < 0 || member < judge)) judge = member;
    if (judge < 0) continue;
    const int first = way[static_cast<size_t>(judge)];
    if (judge == rank_) {
      pronounce(key, report, way);
    } else if (first != report.sent_to) {
      send(first, frame_of<ReportMessage>(key, report.members, report.record, report.by));
      report.sent_to = first;
    }
  }
}

// ---- with mutex_ held ----

/// The first one counts; of those that come at once, the lowest rank's.
void ControlMesh::take_note(uint64_t key, Report report) {
  const auto [noted, is_first] = reports_.try_emplace(key, report);
  if (!is_first && noted->second.sent_to < 0 && report.by < noted->second.by)
    noted->second = std::move(report);
}

void ControlMesh::tell_lost_sight() {
  std::vector<int> lost;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (has_lost_sight_of(r) || (peer(r).open && !hear_each_other(r, rank_))) lost.push_back(r);
  if (lost == told_lost_) return;
  told_lost_ = lost;
  for (int r = 0; r < static_cast<int>(peers_.size()); ++r)
    if (peer(r).open) send(r, frame_of<LostSightMessage>(lost));
}

/// Whether ranks a and b hear each other, as far as this rank knows.
bool ControlMesh::hear_each_other(int a, int b) const {
  if (a == rank_) std::swap(a, b);
  if (b == rank_) return peer(a).open && now() - peer(a).heard < kMute;
  const auto has_gone = [&](int r) { return !peer(r).open && !has_lost_sight_of(r); };
  return !has_gone(a) && !has_gone(b) && !peer(a).out_of_sight.contains(b) &&
         !peer(b).out_of_sight.contains(a);
}

/// By rank: the first one on the shortest way to it, -1 where there is none.
std::vector<int> ControlMesh::ways() const {
  const int size = static_cast<int>(peers_.size());
  std::vector<int> first(peers_.size(), -1), reached{rank_};
  first[static_cast<size_t>(rank_)] = rank_;
  for (size_t i = 0; i < reached.size(); ++i)
    for (int r = 0; r < size; ++r) {
      const int at = reached[i];
      if (first[static_cast<size_t>(r)] >= 0 || !hear_each_other(at, r)) continue;
      first[static_cast<size_t>(r)] = at == rank_ ? r : first[static_cast<size_t>(at)];
      reached.push_back(r);
    }
  return first;
}

/// Sends the verdict to all members, also to those that are silent just now.
void ControlMesh::pronounce(uint64_t key, const Report& report, const std::vector<int>& way) {
  const auto verdict = verdicts_.try_emplace(key, report.record).first;
  std::set<int> next;
  for (const int member : report.members) {
    if (const int first = way[static_cast<size_t>(member)]; first >= 0)
      next.insert(first);
    else if (peer(member).open)
      next.insert(member);
  }
  next.erase(rank_);
  for (const int r : next) send(r, frame_of<VerdictMessage>(key, verdict->second));
  deliver(key);
}

void ControlMesh::deliver(uint64_t key) {
  reports_.erase(key);
  const auto verdict = verdicts_.find(key);
  const auto cell = cells_.find(key);
  if (verdict == verdicts_.end() || cell == cells_.end()) return;
  FailureRecord& record = *cell->second;
  if (record.state.value.load(std::memory_order_relaxed) == 2) return;
  record.state.value.store(1, std::memory_order_seq_cst);
  record.record = verdict->second;
  record.state.value.store(2, std::memory_order_seq_cst);  // partners: failed, verdict
  ring(doorbell_.get());
}

}  // namespace farandole
