#include "core/sim_negotiation.h"

#include <algorithm>
#include <deque>
#include <map>
#include <random>
#include <set>
#include <stdexcept>

#include "named/negotiator.h"

namespace farandole {
namespace {

using Message = std::vector<std::byte>;

/// One rank's decisions, in order of receipt: the set, and "set/name/n" or "set/name/n/refused".
using Told = std::vector<std::pair<uint32_t, std::string>>;

/// How the submissions of one name differ between ranks and times.
enum class Habit { constant, transient, changing, uneven, disagreeing };

struct Plan {
  uint32_t set;
  std::string name;
  Habit habit;
  int times;
};

struct Submission {
  Name name;
  int done = 0;  // times
};

class Simulation {
 public:
  Simulation(uint64_t seed, int ranks, int names, int times, size_t ids)
      : random_(seed),
        size_(ranks),
        coordinator_(ranks, ids),
        up_(static_cast<size_t>(ranks)),
        down_(static_cast<size_t>(ranks)) {
    report_.seed = seed;
    report_.ranks = ranks;
    make_sets();
    for (uint32_t set = 0; set < sets_.size(); ++set)
      for (int i = 0; i < names; ++i)
        plans_.push_back({set, "x" + std::to_string(i), static_cast<Habit>(draw(5)), times});
    for (int r = 0; r < ranks; ++r) ranks_.emplace_back(plans_.size(), draw(2 * names + 1));
  }

  NegotiationReport run() {
    try {
      for (size_t idle = 0; idle < 200 + 50 * ranks_.size(); idle = turn() ? 0 : idle + 1) {
      }
      look_at_the_end();
    } catch (const std::exception& error) {
      complain(error.what());
    }
    report_.stale = coordinator_.stale();
    return report_;
  }

 private:
  struct Rank {
    Rank(size_t plans, int tails_) : submissions(plans), tails(tails_) {}
    Participant participant;
    std::deque<Submission> submissions;  // by plan
    int tails;                           // operations that not all ranks come to
    std::map<std::string, std::unique_ptr<Submission>> tail_names;
    int next_tail = 0;
    bool joins = false;
    int last = -1;  // rank that joined last, as reported
    Told told;
  };

  int draw(int below) { return static_cast<int>(random_() % static_cast<uint64_t>(below)); }
  void complain(const std::string& what) {
    if (report_.complaint.empty()) report_.complaint = what;
  }

  void make_sets() {
    std::vector<int> all;
    for (int r = 0; r < size_; ++r) all.push_back(r);
    sets_.push_back(all);
    for (int i = 0; i < 2; ++i) {
      std::vector<int> some;
      for (const int r : all)
        if (draw(2) == 0) some.push_back(r);
      if (!some.empty()) sets_.push_back(some);
    }
    for (uint32_t s = 0; s < sets_.size(); ++s) coordinator_.add_set(s, sets_[s]);
  }

  bool has(uint32_t set, int rank) const {
    return std::ranges::find(sets_[set], rank) != sets_[set].end();
  }

  /// Rank `r`'s signature of a name at its n-th submission.
  Signature signature_of(const Plan& plan, int r, int n) const {
    Signature t;
    t.kind = plan.habit == Habit::uneven ? Collective::all_gather : Collective::all_reduce;
    t.name = plan.name;
    t.set = plan.set;
    t.lasting = plan.habit != Habit::transient;
    int64_t rows = 3;
    if (plan.habit == Habit::changing) rows += n / 2;
    if (plan.habit == Habit::uneven) rows += (n / 3) * r;
    const bool differs = plan.habit == Habit::disagreeing && n % 2 == 1 && r == sets_[plan.set][0];
    t.tensors = {{differs ? DType::float64 : DType::float32, {rows, 2}}};
    return t;
  }
  bool is_refused(const Plan& plan, int n) const {
    return plan.habit == Habit::disagreeing && n % 2 == 1 && sets_[plan.set].size() > 1;
  }

  /// Runs one random event. Returns false if it changed nothing.
  bool turn() {
    const int r = draw(size_);
    const auto index = static_cast<size_t>(r);
    Rank& rank = ranks_[index];
    Message message;
    switch (draw(6)) {
      case 0:
        return submit(r, rank);
      case 1:
        if (!rank.participant.take_message(message)) return false;
        report_.bytes += message.size();
        up_[index].push_back(std::move(message));
        return true;
      case 2:
        if (up_[index].empty()) return false;
        coordinator_.receive(r, up_[index].front(), TimePoint{});
        up_[index].pop_front();
        return true;
      case 3:
        coordinator_.order();
        return false;
      case 4:
        if (!coordinator_.take_message(r, message)) return false;
        report_.bytes += message.size();
        down_[index].push_back(std::move(message));
        return true;
      default:
        if (down_[index].empty()) return false;
        hear(r, rank);
        return true;
    }
  }

  bool submit(int r, Rank& rank) {
    const size_t begin = static_cast<size_t>(draw(static_cast<int>(plans_.size())));
    for (size_t i = 0; i < plans_.size(); ++i) {
      const size_t p = (begin + i) % plans_.size();
      Submission& s = rank.submissions[p];
      if (!has(plans_[p].set, r) || s.done == plans_[p].times) continue;
      if (s.name.owner != nullptr) continue;  // under way
      offer(rank, s, signature_of(plans_[p], r, s.done));
      return true;
    }
    if (rank.joins || !is_through(r, rank)) return false;
    if (rank.next_tail < rank.tails) {
      auto& tail = rank.tail_names["tail" + std::to_string(rank.next_tail++)];
      tail = std::make_unique<Submission>();
      Signature t =
          signature_of({0, "tail" + std::to_string(rank.next_tail - 1), Habit::constant, 1}, r, 0);
      offer(rank, *tail, std::move(t));
      return true;
    }
    rank.joins = true;
    last_to_join_ = r;
    rank.participant.join(TimePoint(std::chrono::nanoseconds(++joins_)));
    return true;
  }

  /// True if all ranks have only tails left. A rank that has joined may stand in for tails alone.
  bool is_through(int, const Rank&) const {
    for (int r = 0; r < size_; ++r)
      for (size_t p = 0; p < plans_.size(); ++p)
        if (has(plans_[p].set, r) &&
            ranks_[static_cast<size_t>(r)].submissions[p].done < plans_[p].times)
          return false;
    return true;
  }

  static void offer(Rank& rank, Submission& s, Signature signature) {
    if (s.name.signature != signature) {
      s.name.signature = std::move(signature);
      s.name.agreed = false;
    }
    s.name.owner = &s;
    rank.participant.submit(s.name);
  }

  void hear(int r, Rank& rank) {
    const auto index = static_cast<size_t>(r);
    std::vector<Decision> decisions;
    rank.participant.receive(down_[index].front(), decisions);
    down_[index].pop_front();
    for (Decision& d : decisions) {
      if (d.what == Decision::What::joined) {
        if (!rank.joins || rank.last >= 0) complain("a rank that has not joined is told so");
        rank.last = d.more->last;
      } else if (d.what == Decision::What::forget) {
        ++report_.forgotten;
        if (d.name->id != kNoId) complain("a forgotten name has an id");
      } else if (d.what == Decision::What::by_proxy) {
        ++report_.stood_in;
        if (!rank.joins) complain("a rank that has not joined stands in");
        note(rank, d.more->signature, 0, false);
      } else if (d.what == Decision::What::run || d.what == Decision::What::refuse) {
        decided(rank, d);
      }
    }
  }

  void decided(Rank& rank, Decision& d) {
    auto* s = static_cast<Submission*>(d.name->owner);
    if (s == nullptr)
      return complain("an order of " + d.name->signature.title() + ", not submitted");
    s->name.owner = nullptr;
    const Signature& signature = s->name.signature;
    const bool refused = d.what == Decision::What::refuse;
    const Plan* plan = nullptr;
    for (const Plan& p : plans_)
      if (p.set == signature.set && p.name == signature.name) plan = &p;
    if (plan != nullptr) {
      if (refused != is_refused(*plan, s->done)) complain(signature.title() + " is judged wrongly");
      if (refused && (d.more->error.front().code() != ErrorCode::mismatch ||
                      d.more->error.front().where().values.size() != 2))
        complain("a refusal that does not say why");
      if (plan->habit == Habit::uneven && !refused) check_extents(*plan, s->done, d);
    }
    note(rank, signature, s->done++, refused);
  }

  void check_extents(const Plan& plan, int n, const Decision& d) {
    const std::vector<int64_t>& extents =
        d.more && d.more->once ? d.more->extents : d.name->extents;
    std::vector<int64_t> expected;
    for (const int m : sets_[plan.set])
      expected.push_back(signature_of(plan, m, n).tensors[0].shape[0]);
    if (extents != expected) complain(plan.name + " has other extents than were submitted");
  }

  void note(Rank& rank, const Signature& signature, int n, bool refused) {
    rank.told.emplace_back(signature.set, std::to_string(signature.set) + "/" + signature.name +
                                              "/" + std::to_string(n) +
                                              (refused ? "/refused" : ""));
    ++(refused ? report_.refused : report_.ordered);
  }

  void look_at_the_end() {
    std::set<int> last;
    for (int r = 0; r < size_; ++r) {
      Rank& rank = ranks_[static_cast<size_t>(r)];
      if (!is_through(r, rank)) complain("rank " + std::to_string(r) + " waits for ever");
      if (rank.last < 0) complain("rank " + std::to_string(r) + " was not told of the last join");
      last.insert(rank.last);
      std::set<std::string> seen;
      for (const auto& [set, what] : rank.told)
        if (!seen.insert(what).second) complain(what + " is ordered twice");
    }
    if (last.size() > 1) complain("ranks differ on who joined last");
    if (!last.empty() && *last.begin() != last_to_join_) complain("another rank joined last");
    for (int a = 0; a < size_; ++a)
      for (int b = 0; b < a; ++b)
        if (in_common(a, b) != in_common(b, a))
          complain("ranks " + std::to_string(a) + " and " + std::to_string(b) +
                   " were told different orders");
  }

  /// The decisions that rank `a` received about sets that contain `b`.
  std::vector<std::string> in_common(int a, int b) const {
    std::vector<std::string> common;
    for (const auto& [set, what] : ranks_[static_cast<size_t>(a)].told)
      if (has(set, b)) common.push_back(what);
    return common;
  }

  std::mt19937_64 random_;
  int size_;
  Coordinator coordinator_;
  std::vector<std::vector<int>> sets_;
  std::vector<Plan> plans_;
  std::deque<Rank> ranks_;
  int joins_ = 0;  // calls of join() until now
  int last_to_join_ = -1;
  std::vector<std::deque<Message>> up_, down_;  // by rank
  NegotiationReport report_;
};

}  // namespace

NegotiationReport simulate_negotiation(uint64_t seed, int ranks, int names, int times, size_t ids) {
  return Simulation(seed, ranks, names, times, ids).run();
}

}  // namespace farandole
