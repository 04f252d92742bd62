#include "core/sim_world.h"

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <limits>
#include <memory>
#include <new>
#include <optional>
#include <string_view>
#include <vector>

#include "backends/mesh.h"
#include "backends/schedule_backend.h"
#include "core/sim_operation.h"
#include "transport/chaos.h"
#include "transport/shm.h"
#include "transport/transports.h"

namespace farandole {
namespace {

constexpr size_t kArenaBytes = size_t{256} << 20;  // sparse
constexpr int kTurnsWithoutAMove = 30'000;
constexpr auto kDeathPatience = std::chrono::seconds(10);  // far beyond the engine's own
constexpr size_t kMostAhead = 4;                           // operations of a stream in flight

enum class Fate { lives, aborted, cut, bereaved };
constexpr std::string_view kFates[] = {"lives", "aborted", "cut", "bereaved"};

struct SimGroup {
  std::vector<int> members;  // world ranks
  FailureRecord* cell = nullptr;
  uint64_t key = 0;

  Membership of(size_t r) const {
    return {key, static_cast<int>(r), members, std::make_shared<HostFailureDetector>(*cell),
            &cell->state.value};
  }
  bool has(int rank) const { return std::ranges::find(members, rank) != members.end(); }
};

/// One rank's side of one stream.
struct SimSide {
  std::shared_ptr<Stream> stream;  // opened with its first operation
  size_t submitted = 0;
  size_t checked = 0;
  std::vector<Handle> handles;
  std::vector<std::shared_ptr<int>> completions;
};

struct SimStream {
  size_t group = 0;
  uint64_t number = 0;
  std::vector<SimOperation> operations;
  std::vector<SimSide> sides;  // by rank in the group
};

class SimWorld {
 public:
  SimWorld(uint64_t seed, int steps, int ranks);
  SimReport run();

 private:
  void make_engines();
  void make_groups();
  void draw_hosts();
  std::vector<int> hosts_of(const std::vector<int>& members) const;
  void draw_operations(int steps);
  BackendMaker schedules(int rank);

  uint64_t below(uint64_t n) { return random_() % n; }
  bool lives(int rank) const { return rank != victim_; }
  Engine& engine(int rank) { return *engines_[static_cast<size_t>(rank)]; }
  int draw_living();
  bool take_a_step();
  bool submit(SimStream& stream, size_t r);
  bool drive(int rank);
  bool look(SimStream& stream, size_t r);
  void strike();
  bool over() const;
  void go_on_until_the_dead_are_known();
  void check(const SimStream& stream, size_t r, size_t i);
  void check_completions();
  void check_verdicts();
  std::string where(const SimStream& stream, size_t r, size_t i) const;
  void complain(const std::string& what) {
    if (report_.complaint.empty()) report_.complaint = what;
  }

  SimRandom random_;
  SimReport report_;
  int size_;
  Fate fate_;
  uint64_t strikes_at_;       // when, in steps of the world
  std::vector<int> host_of_;  // by rank, as schedules have it; empty: all share one
  bool by_memory_ = false;    // schedules go over shared memory, else over rings in the heap
  int victim_ = kNobody;
  std::shared_ptr<InprocHub> hub_ = std::make_shared<InprocHub>();
  std::vector<Fd> ends_;  // by rank: becomes readable with its death, as a process descriptor
  std::vector<std::shared_ptr<Engine>> engines_;
  std::vector<SimGroup> groups_;
  std::vector<SimStream> streams_;
};

// ---- the world ----

SimWorld::SimWorld(uint64_t seed, int steps, int ranks) : random_(seed), size_(ranks) {
  report_.seed = seed;
  report_.ranks = ranks;
  const uint64_t lot = below(8);
  fate_ = lot < 4 || ranks < 2 ? Fate::lives
          : lot < 5            ? Fate::aborted
          : lot < 6            ? Fate::cut
                               : Fate::bereaved;
  report_.fate = kFates[static_cast<size_t>(fate_)];
  by_memory_ = below(2) == 0;
  strikes_at_ = below(static_cast<uint64_t>(steps) * static_cast<uint64_t>(ranks) * 6 + 1);
  draw_hosts();
  make_engines();
  make_groups();
  draw_operations(steps);
}

/// Half of the worlds have two or three, with ranks anywhere.
void SimWorld::draw_hosts() {
  if (below(2) == 0) return;
  const uint64_t hosts = 2 + below(2);
  for (int r = 0; r < size_; ++r) host_of_.push_back(static_cast<int>(below(hosts)));
}

std::vector<int> SimWorld::hosts_of(const std::vector<int>& members) const {
  std::vector<int> hosts;
  if (host_of_.empty()) return hosts;
  for (const int member : members) hosts.push_back(host_of_[static_cast<size_t>(member)]);
  return hosts;
}

BackendMaker SimWorld::schedules(int rank) {
  ChaosPlan plan;
  plan.seed = random_();
  plan.longest_write = 1024 + below(8192);
  plan.longest_read = 1024 + below(8192);
  plan.longest_delay = static_cast<unsigned>(below(4));
  if (fate_ == Fate::cut) plan.cut_at = below(100'000);
  return [this, rank, plan](const Engine& engine, const Membership& membership, uint64_t key,
                            const StreamMemory& memory) {
    auto inner =
        by_memory_ ? shm_transport(engine.arena(), rank, "local") : inproc_transport(hub_, rank);
    const std::shared_ptr<Transport> transport = chaos_transport(std::move(inner), plan);
    std::vector<PeerInfo> members;
    for (const int r : membership.members)
      members.push_back(engine.host().peers[static_cast<size_t>(r)].info);
    const int size = static_cast<int>(members.size());
    return std::make_unique<ScheduleBackend>(
        ScheduleGroup{membership.rank, size, hosts_of(membership.members)},
        connect_members({transport}, std::move(members), key),
        by_memory_ ? engine.arena() : nullptr, ChannelCosts{}, &memory);
  };
}

void SimWorld::make_engines() {
  std::vector<Host> hosts = hosts_in_process(size_, kArenaBytes);
  for (int r = 0; r < size_; ++r) ends_.push_back(make_event_fd());
  EngineOptions options;
  options.threads = false;
  options.warn_after = std::chrono::hours(1);
  // Every third world counts through the wrap of its sequence numbers.
  if (below(3) == 0)
    options.first_sequence = std::numeric_limits<uint32_t>::max() - static_cast<uint32_t>(below(8));
  for (int r = 0; r < size_; ++r) {
    Host& host = hosts[static_cast<size_t>(r)];
    for (int p = 0; p < size_; ++p)
      host.peers[static_cast<size_t>(p)].process =
          Fd(checked(::fcntl(ends_[static_cast<size_t>(p)].get(), F_DUPFD_CLOEXEC, 0), "dup"));
    options.direct = paths_over_shm(std::make_shared<TuningTable>());
    options.schedules = schedules(r);
    engines_.push_back(std::make_shared<Engine>(std::move(host), options));
  }
}

/// The world and, where there are ranks enough, two groups that overlap, in any order of members.
void SimWorld::make_groups() {
  std::vector<int> everybody;
  for (int r = 0; r < size_; ++r) everybody.push_back(r);
  groups_.push_back({everybody, nullptr, 0});
  for (int i = 0; size_ >= 3 && i < 2; ++i) {
    std::ranges::shuffle(everybody, random_);
    const auto members = 2 + static_cast<std::ptrdiff_t>(below(static_cast<uint64_t>(size_) - 1));
    groups_.push_back({{everybody.begin(), everybody.begin() + members}, nullptr, 0});
  }
  for (size_t g = 0; g < groups_.size(); ++g) {
    SimGroup& group = groups_[g];
    group.key = random_();
    group.cell =
        new (engine(group.members[0]).arena()->allocate(sizeof(FailureRecord))) FailureRecord;
    for (uint64_t number = 0; number < (g == 0 ? 3 : 2); ++number)
      streams_.push_back({g, number, {}, std::vector<SimSide>(group.members.size())});
  }
}

void SimWorld::draw_operations(int steps) {
  for (int i = 0; i < steps; ++i) {
    SimStream& stream = streams_[below(streams_.size())];
    std::vector<std::shared_ptr<Arena>> arenas;
    for (const int r : groups_[stream.group].members) arenas.push_back(engine(r).arena());
    stream.operations.push_back(
        draw_operation(random_, arenas, hosts_of(groups_[stream.group].members)));
  }
  report_.operations = steps;
}

// ---- its life ----

int SimWorld::draw_living() {
  int rank = victim_;
  while (rank == victim_) rank = static_cast<int>(below(static_cast<uint64_t>(size_)));
  return rank;
}

bool SimWorld::submit(SimStream& stream, size_t r) {
  SimSide& side = stream.sides[r];
  if (side.submitted == stream.operations.size()) return false;
  if (side.submitted - side.checked >= kMostAhead) return false;
  const SimGroup& group = groups_[stream.group];
  Engine& mine = engine(group.members[r]);
  if (!side.stream) side.stream = mine.open_stream(group.of(r), "", stream.number);
  Operation operation = stream.operations[side.submitted].shares[r]->operation();
  auto calls = std::make_shared<int>(0);
  operation.keepalive = stream.operations[side.submitted].shares[r];
  operation.completion = [calls](const Error*) { ++*calls; };
  side.completions.push_back(calls);
  side.handles.push_back(mine.submit(side.stream, std::move(operation), below(2) == 0));
  ++side.submitted;
  return true;
}

/// The doors through which a thread may come to poll: all take turns, so the token moves.
bool SimWorld::drive(int rank) {
  Engine& mine = engine(rank);
  switch (below(8)) {
    case 0:  // a hook
      mine.driver().turn(Duration::zero());
      return false;
    case 1:  // about to sleep
      mine.park(Duration::zero());
      return false;
    case 2: {  // a waiter out of time
      SimStream& stream = streams_[below(streams_.size())];
      const auto& members = groups_[stream.group].members;
      const auto r = static_cast<size_t>(std::ranges::find(members, rank) - members.begin());
      if (r == members.size() || stream.sides[r].handles.empty()) return false;
      try {
        (void)stream.sides[r].handles.back().wait(Deadline{TimePoint::min()});
      } catch (const Error&) {  // NOLINT(bugprone-empty-catch): look() judges it
      }
      return false;
    }
    default:
      const bool moved = mine.poll(TimePoint::min());
      mine.run_completions();
      return moved;
  }
}

/// Judges what has finished since the last look.
bool SimWorld::look(SimStream& stream, size_t r) {
  SimSide& side = stream.sides[r];
  const size_t before = side.checked;
  while (side.checked < side.submitted && side.handles[side.checked].done())
    check(stream, r, side.checked++);
  return side.checked != before;
}

bool SimWorld::take_a_step() {
  const int rank = draw_living();
  bool moved = drive(rank);
  for (SimStream& stream : streams_) {
    const auto& members = groups_[stream.group].members;
    const auto r = static_cast<size_t>(std::ranges::find(members, rank) - members.begin());
    if (r == members.size()) continue;
    if (below(4) == 0) moved |= submit(stream, r);
    moved |= look(stream, r);
  }
  return moved;
}

void SimWorld::strike() {
  if (fate_ == Fate::aborted) {
    const SimGroup& group = groups_[below(groups_.size())];
    const int rank = group.members[below(group.members.size())];
    HostFailureDetector(*group.cell)
        .report(Error(ErrorCode::aborted, "rank " + std::to_string(rank) + " has had enough"));
    engine(rank).wake_everyone();
  } else if (fate_ == Fate::bereaved) {
    victim_ = static_cast<int>(below(static_cast<uint64_t>(size_)));
    ring(ends_[static_cast<size_t>(victim_)].get());
  }
}

bool SimWorld::over() const {
  for (const SimStream& stream : streams_)
    for (size_t r = 0; r < stream.sides.size(); ++r)
      if (lives(groups_[stream.group].members[r]) &&
          stream.sides[r].checked < stream.operations.size())
        return false;
  return true;
}

/// A death is believed a little after it has been seen: only here does time pass.
void SimWorld::go_on_until_the_dead_are_known() {
  const TimePoint until = now() + kDeathPatience;
  while (!over() && now() < until) {
    for (int rank = 0; rank < size_; ++rank)
      if (lives(rank)) engine(rank).park(std::chrono::milliseconds(1));
    for (int i = 0; i < 100; ++i) take_a_step();
  }
}

SimReport SimWorld::run() {
  int idle = 0;
  for (uint64_t step = 0; !over() && idle < kTurnsWithoutAMove; ++step) {
    if (step == strikes_at_) strike();
    idle = take_a_step() ? 0 : idle + 1;
    if (victim_ != kNobody && idle > kTurnsWithoutAMove / 10) break;
  }
  if (victim_ != kNobody) go_on_until_the_dead_are_known();
  for (int rank = 0; rank < size_; ++rank) {
    if (!over() && lives(rank)) complain("nothing moves any more; " + engine(rank).describe());
    if (lives(rank)) engine(rank).run_completions();
    report_.turns += engine(rank).counters().turns;
  }
  check_completions();
  check_verdicts();
  streams_.clear();
  return report_;
}

// ---- what must hold ----

std::string SimWorld::where(const SimStream& stream, size_t r, size_t i) const {
  const SimGroup& group = groups_[stream.group];
  return "operation " + std::to_string(i) + " of stream " + std::to_string(stream.number) +
         " of group " + describe_ranks(group.members) + " on rank " +
         std::to_string(group.members[r]) + " (" + stream.operations[i].text + ")";
}

void SimWorld::check(const SimStream& stream, size_t r, size_t i) {
  const SimOperation& operation = stream.operations[i];
  const Error* error = stream.sides[r].handles[i].error();
  if (error == nullptr) {
    if (operation.end != SimEnd::right) complain("not refused: " + where(stream, r, i));
    if (!operation.shares[r]->is_right()) complain("wrong bits: " + where(stream, r, i));
    ++report_.correct;
    return;
  }
  const bool refusal =
      (operation.end == SimEnd::mismatch && error->code() == ErrorCode::mismatch) ||
      (operation.end == SimEnd::not_shared && error->code() == ErrorCode::invalid_argument);
  if (refusal) {
    ++report_.refused;
    return;
  }
  ++report_.failed;
  const auto verdict = HostFailureDetector(*groups_[stream.group].cell).verdict();
  if (!verdict || std::string_view(verdict->what()) != error->what())
    complain("an error that is not the group's verdict: " + where(stream, r, i) + ": " +
             error->what());
}

void SimWorld::check_completions() {
  for (const SimStream& stream : streams_)
    for (size_t r = 0; r < stream.sides.size(); ++r)
      for (size_t i = 0; i < stream.sides[r].checked; ++i)
        if (lives(groups_[stream.group].members[r]) && *stream.sides[r].completions[i] != 1)
          complain("completed " + std::to_string(*stream.sides[r].completions[i]) +
                   " times: " + where(stream, r, i));
}

/// A group fails only by what was done to the world, and says so.
void SimWorld::check_verdicts() {
  for (const SimGroup& group : groups_) {
    const auto verdict = HostFailureDetector(*group.cell).verdict();
    if (!verdict) continue;
    if (report_.verdict.empty()) report_.verdict = verdict->what();
    const bool expected = (fate_ == Fate::aborted && verdict->code() == ErrorCode::aborted) ||
                          (fate_ == Fate::cut && verdict->code() == ErrorCode::link) ||
                          (fate_ == Fate::bereaved && verdict->code() == ErrorCode::peer_lost &&
                           verdict->where().rank == victim_ && group.has(victim_));
    if (!expected)
      complain("group " + describe_ranks(group.members) +
               " failed for no reason: " + verdict->what());
  }
}

}  // namespace

SimReport simulate(uint64_t seed, int steps, int ranks) {
  if (ranks < 1 || ranks > 64)
    throw Error(ErrorCode::invalid_argument,
                "a world of " + std::to_string(ranks) + " ranks cannot be simulated");
  return SimWorld(seed, steps, ranks).run();
}

}  // namespace farandole
