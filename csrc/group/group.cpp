#include "group/group.h"

#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>
#include <thread>

#include "base/blocked_threads.h"
#include "base/hash.h"
#include "base/wire.h"
#include "control/mesh_failure_detector.h"
#include "engine/fork.h"
#include "group/arguments.h"
#include "stream/stream_page.h"
#include "stream/world_key.h"

namespace farandole {
namespace {

constexpr auto kVerdictPatience = std::chrono::seconds(1);
constexpr auto kBetweenVerdictLooks = std::chrono::microseconds(100);
constexpr uint64_t kFormedSalt = 0xf02d'f02d'f02d'f02d;  // keys of form() are none of split()'s

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd;
  return (h ^ (h >> 29)) | 1;
}

/// Waits, as only the creation of a group does, until `rank` has published `key`.
uint64_t await(const Engine& engine, int rank, uint64_t key, Deadline deadline,
               const std::function<void()>& interrupted) {
  for (int looks = 0;; ++looks) {
    std::optional<Error> absence;
    if (looks >= 1000) absence = absence_of(engine.host(), rank, "before it created the group");
    if (const auto offset = engine.host().segment->find(rank, key)) return *offset;
    if (absence) throw Error(*absence);
    if (deadline.passed(now()))
      throw Error(ErrorCode::stalled,
                  "rank " + std::to_string(rank) + " did not create the group in time");
    if (looks < 1000) {
      std::this_thread::yield();
    } else {
      if (looks % 1000 == 0) interrupted();  // ten times a second
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

BundledArray bundled(const CollectiveCall& call) {
  const Options& o = call.options;
  const auto& [input, output] = call.operand;
  Hash rest;
  rest.add(static_cast<uint64_t>(o.op) | static_cast<uint64_t>(o.root) << 32);
  rest.add(o.prescale);
  rest.add(o.postscale);
  // One of uneven shares has another count on every rank; a scatter's is what everybody gets.
  const Buffer& even = o.kind == Collective::scatter ? output : input;
  return {o.counts.empty() ? even.count : 0, o.counts.empty() ? 0 : hash_of(o.counts), rest.value(),
          input.dtype, o.kind};
}

/// Two threads that submit to one group would do so in different orders on different ranks.
class InOrder {
 public:
  explicit InOrder(std::atomic<bool>& submitting) : submitting_(submitting) {
    if (submitting_.exchange(true, std::memory_order_acquire))
      throw invalid_argument(
          "two threads submit to one group at the same time; their order would differ "
          "between ranks");
  }
  ~InOrder() { submitting_.store(false, std::memory_order_release); }
  InOrder(const InOrder&) = delete;
  InOrder& operator=(const InOrder&) = delete;

 private:
  std::atomic<bool>& submitting_;
};

}  // namespace

std::shared_ptr<Group> Group::world(std::shared_ptr<Engine> engine, GroupDefaults defaults,
                                    Deadline deadline) {
  std::vector<int> members(static_cast<size_t>(engine->host().size()));
  for (size_t r = 0; r < members.size(); ++r) members[r] = static_cast<int>(r);
  return std::shared_ptr<Group>(
      new Group(std::move(engine), std::move(members), kWorldKey, std::move(defaults), deadline));
}

Group::Group(std::shared_ptr<Engine> engine, std::vector<int> members, uint64_t key,
             GroupDefaults defaults, Deadline deadline)
    : engine_(std::move(engine)), defaults_(std::move(defaults)), pool_(engine_->arena()) {
  membership_.key = key;
  membership_.members = std::move(members);
  membership_.rank = static_cast<int>(
      std::find(membership_.members.begin(), membership_.members.end(), engine_->host().rank) -
      membership_.members.begin());
  membership_.group = "group of " + name_ranks(membership_.members);
  if (engine_->host().are_here(membership_.members))
    share_fate_in_memory(deadline);
  else
    share_fate_over_mesh();
  program_order_ = engine_->open_stream(membership_, "", 0);
  newest_ = program_order_.get();
}

void Group::share_fate_over_mesh() {
  const Host& host = engine_->host();
  const uint64_t key = stream_key(membership_.key, kFateNumber);
  auto detector = std::make_unique<MeshFailureDetector>(host.mesh, key, membership_.members);
  membership_.abort = &detector->state();
  host.segment->publish(host.rank, key, 0);
  membership_.detector =
      engine_->share_detector(std::move(detector), key, nullptr, membership_.members);
}

void Group::share_fate_in_memory(Deadline deadline) {
  const Host& host = engine_->host();
  const uint64_t record_key = stream_key(membership_.key, kFateNumber);
  const int leader = membership_.members.front();
  // The lowest member owns the cell; the others publish only that they may look at it.
  std::byte* owned = nullptr;
  if (host.rank == leader) {
    owned = engine_->arena()->allocate(sizeof(FailureRecord));
    new (owned) FailureRecord;
  }
  host.segment->publish(host.rank, record_key,
                        owned != nullptr ? *host.segment->offset_of(owned, 1) : 0);
  const uint64_t offset = await(*engine_, leader, record_key, deadline, defaults_.interrupted);
  auto* cell = std::launder(reinterpret_cast<FailureRecord*>(
      taken("the place of a group's verdict", leader, host.rank,
            [&] { return host.segment->at(offset, sizeof(FailureRecord)); })));
  membership_.detector = engine_->share_detector(std::make_unique<HostFailureDetector>(*cell),
                                                 record_key, owned, membership_.members);
  membership_.abort = &cell->state.value;
}

Group::~Group() {
  if (!any_source_ || in_child()) return;
  any_source_->close();
  engine_->drop_task(any_source_);
}

/// Throws Error(invalid_argument) for what this rank can know to be wrong; else fills in all of
/// `operation`.
void Group::prepare(Operation& operation, const Stream& stream, Buffer input, Buffer output,
                    Options&& o) const {
  check();
  const Shape shape = checked_shape(input, output, o, rank(), size());
  operation.input = input;
  operation.output = output;
  operation.count = shape.count;
  operation.counts = std::move(o.counts);
  static_cast<CollectiveSpec&>(operation) = o;
  if (o.epilogue)
    operation.algorithm = "mapped";
  else if (o.algorithm.empty())
    operation.algorithm = defaults_.algorithm;
  else
    operation.algorithm = std::move(o.algorithm);
  operation.epilogue = std::move(o.epilogue);
  operation.level = o.level.value_or(defaults_.level);
  fill(operation, std::move(o));
  if (!operation.algorithm.empty() && !operation.on_devices) stream.require_backend(operation);
}

/// Moves the options that every operation has.
void Group::fill(Operation& operation, Options&& o) const {
  operation.name = std::move(o.name);
  operation.bundle = std::move(o.bundle);
  operation.gate = std::move(o.gate);
  operation.on_devices = std::move(o.on_devices);
  operation.deadline = o.deadline.value_or(Deadline::never());
  operation.timeout = o.deadline ? Duration::zero() : defaults_.timeout;
  operation.keepalive = std::move(o.keepalive);
  operation.completion = std::move(o.completion);
}

Handle Group::submit(Buffer input, Buffer output, Options options, bool caller_waits) {
  const InOrder order(submitting_);
  newest_.store(program_order_.get(), std::memory_order_relaxed);
  return submit_to(program_order_, input, output, std::move(options), caller_waits);
}

Handle Group::submit_to(const std::shared_ptr<Stream>& stream, Buffer input, Buffer output,
                        Options options, bool caller_waits) {
  Operation operation;
  prepare(operation, *stream, input, output, std::move(options));
  return engine_->submit(stream, std::move(operation), caller_waits);
}

Handle Group::begin_on(const std::shared_ptr<Stream>& stream, CollectiveCall call, int looks) {
  auto request = std::make_shared<Request>();
  prepare(request->operation, *stream, call.operand.input, call.operand.output,
          std::move(call.options));
  engine_->run(stream, request, looks);
  return {engine_, std::move(request)};
}

Handle Group::run(const PlainCall& call, int looks) {
  const InOrder order(submitting_);
  newest_.store(program_order_.get(), std::memory_order_relaxed);
  const bool again = spare_ && call == checked_;
  std::shared_ptr<Request> request = spare_ ? std::move(spare_) : std::make_shared<Request>();
  if (again) {
    check();
  } else {
    Options options;
    static_cast<CollectiveSpec&>(options) = call.spec;
    prepare(request->operation, *program_order_, call.input, call.output, std::move(options));
    request->operation.hash = hash_of(request->operation);
    checked_ = call;
  }
  if (!engine_->run(program_order_, request, looks)) return {engine_, std::move(request)};
  if (request->error) throw Error(*request->error);
  request->finished.store(false, std::memory_order_relaxed);
  spare_ = std::move(request);  // no other thread has held it
  return {};
}

std::vector<Handle> Group::submit_all(std::vector<CollectiveCall> calls, bool caller_waits) {
  const InOrder order(submitting_);
  std::vector<Operation> operations(calls.size());
  for (size_t i = 0; i < calls.size(); ++i)
    prepare(operations[i], *program_order_, calls[i].operand.input, calls[i].operand.output,
            std::move(calls[i].options));
  newest_.store(program_order_.get(), std::memory_order_relaxed);
  std::vector<Handle> handles;
  for (Operation& operation : operations)
    handles.push_back(engine_->submit(program_order_, std::move(operation), caller_waits));
  return handles;
}

std::vector<Handle> Group::submit_together(const std::string& name,
                                           std::vector<CollectiveCall> calls) {
  std::vector<BundledArray> arrays;
  for (const CollectiveCall& call : calls) arrays.push_back(bundled(call));
  if (calls.size() != 1) {
    const auto bundle = std::make_shared<Bundle>(name, std::move(arrays));
    for (CollectiveCall& call : calls) call.options.bundle = bundle;
  }
  return submit_all(std::move(calls));
}

Handle Group::submit_between(int peer, int tag, Buffer data, Options options, bool caller_waits) {
  check();
  const Collective kind = options.kind;
  const bool sends = kind == Collective::send;
  const std::string what = std::string(name_of(kind)) + (sends ? " to" : " from");
  if (peer < 0 || peer >= size())
    throw invalid_argument(what + " rank " + std::to_string(peer) +
                           ": not a rank of this group of " + std::to_string(size()));
  if (peer == rank())
    throw invalid_argument(what + " rank " + std::to_string(peer) + ", which is this one");
  Operation operation = end_of_transfer(tag, data, std::move(options));
  const Pair pair = sends ? Pair{rank(), peer, tag} : Pair{peer, rank(), tag};
  const auto stream = pairs_->stream(*engine_, membership_, pair);
  newest_.store(stream.get(), std::memory_order_relaxed);
  return engine_->submit(stream, std::move(operation), caller_waits);
}

std::pair<Handle, std::shared_ptr<const int>> Group::submit_from_any(int tag, Buffer data,
                                                                     Options options) {
  check();
  if (size() == 1)
    throw invalid_argument("recv from any rank of a group of one: there is no other");
  auto request = std::make_shared<Request>();
  options.kind = Collective::recv;
  request->operation = end_of_transfer(tag, data, std::move(options));
  std::call_once(any_source_made_, [&] {
    any_source_ = std::make_shared<AnySource>(*engine_, membership_, pairs_);
    engine_->add_task(any_source_);
  });
  auto source = any_source_->submit(request, tag);
  return {Handle(engine_, std::move(request)), std::move(source)};
}

Operation Group::end_of_transfer(int tag, Buffer data, Options&& options) const {
  if (tag < 0) throw invalid_argument("tag " + std::to_string(tag) + " is negative");
  const bool sends = options.kind == Collective::send;
  Operation operation;
  operation.kind = options.kind;
  (sends ? operation.input : operation.output) = data;
  (sends ? operation.output : operation.input).dtype = data.dtype;
  operation.count = data.count;
  fill(operation, std::move(options));
  return operation;
}

std::shared_ptr<Stream> Group::open_stream(std::string label) {
  check();
  return engine_->open_stream(membership_, std::move(label), next_stream_++);
}

std::shared_ptr<Stream> Group::stream_of_names() {
  if (!names_) names_ = engine_->open_stream(membership_, "operations by name", kNamesNumber);
  return names_;
}

std::shared_ptr<Group> Group::split(int color, int key, Deadline deadline,
                                    const std::function<void()>& interrupted) {
  const std::array<int64_t, 2> mine{color, key};
  std::vector<std::array<int64_t, 2>> all(static_cast<size_t>(size()));
  Options options{{Collective::all_gather}};
  options.name = "split";
  options.deadline = deadline;
  const Handle gathered = submit(
      {const_cast<std::byte*>(reinterpret_cast<const std::byte*>(mine.data())), 2, DType::int64},
      {reinterpret_cast<std::byte*>(all.data()), 2 * all.size(), DType::int64}, options, true);
  wait_for(gathered, interrupted);
  const uint64_t group_key =
      mix(mix(membership_.key, ++splits_), static_cast<uint64_t>(color) + 0x100);
  if (color < 0) return nullptr;
  std::vector<int> chosen;  // group ranks
  for (int r = 0; r < size(); ++r)
    if (all[static_cast<size_t>(r)][0] == color) chosen.push_back(r);
  std::stable_sort(chosen.begin(), chosen.end(), [&](int a, int b) {
    return all[static_cast<size_t>(a)][1] < all[static_cast<size_t>(b)][1];
  });
  std::vector<int> members;
  for (const int r : chosen) members.push_back(membership_.members[static_cast<size_t>(r)]);
  return std::shared_ptr<Group>(
      new Group(engine_, std::move(members), group_key, defaults_, deadline));
}

std::shared_ptr<Group> Group::form(const std::vector<int>& ranks, uint64_t token,
                                   Deadline deadline) {
  check();
  std::vector<int> members;
  for (const int r : ranks) {
    if (r < 0 || r >= size())
      throw invalid_argument("rank " + std::to_string(r) + " is not one of this group of " +
                             std::to_string(size()));
    const int member = membership_.members[static_cast<size_t>(r)];
    if (std::find(members.begin(), members.end(), member) != members.end())
      throw invalid_argument("rank " + std::to_string(r) + " is twice in the group to be formed");
    members.push_back(member);
  }
  if (std::find(ranks.begin(), ranks.end(), rank()) == ranks.end())
    throw invalid_argument("rank " + std::to_string(rank()) + " forms a group without itself");
  const uint64_t group_key = mix(mix(membership_.key, kFormedSalt), token);
  return std::shared_ptr<Group>(
      new Group(engine_, std::move(members), group_key, defaults_, deadline));
}

void Group::wait_for(const Handle& handle, const std::function<void()>& interrupted) {
  const auto complete = [&] {
    try {
      return handle.wait(Deadline::after(std::chrono::milliseconds(100)));
    } catch (const Error&) {
      interrupted();  // goes before what another rank reports of the same interruption
      throw;
    }
  };
  std::optional<BlockedThread> blocked;
  while (!complete()) {
    if (!blocked) blocked.emplace();
    try {
      interrupted();
    } catch (...) {
      abort_interrupted();
      try {
        handle.wait();          // nobody writes to the caller's memory any more
      } catch (const Error&) {  // NOLINT: the interruption itself
      }
      throw;
    }
  }
}

void Group::abort(const Error& error) {
  membership_.detector->report(error);
  engine_->wake_everyone();
}

void Group::fail(const Error& error) {
  abort(error);
  // Where ranks share no memory, the verdict is on its way.
  for (const Deadline patience = Deadline::after(kVerdictPatience); !patience.passed(now());) {
    check();
    std::this_thread::sleep_for(kBetweenVerdictLooks);
  }
  throw Error(error);
}

void Group::abort_interrupted(const std::string& by) {
  Context where;
  where.rank = engine_->host().rank;
  where.pid = ::getpid();
  abort(Error(ErrorCode::remote_error,
              "rank " + std::to_string(where.rank) + " was interrupted (" + by + ")", where));
}

void Group::check() const {
  if (membership_.detector->failed())
    if (const auto verdict = membership_.detector->verdict()) throw Error(*verdict);
}

std::shared_ptr<std::byte> Group::allocate(size_t bytes) {
  auto arena = engine_->arena();
  std::byte* data = arena->allocate(bytes);
  return {data, [arena](std::byte* p) { arena->release(p); }};
}

std::string Group::describe() const { return program_order_->describe(); }

}  // namespace farandole
