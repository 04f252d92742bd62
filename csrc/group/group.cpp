#include "group/group.h"

#include <poll.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <new>
#include <thread>

#include "schedule/planners.h"
#include "schedule/slicing.h"

namespace farandole {
namespace {

constexpr uint64_t kWorldKey = 0x5741'4c53'0000'0001;
constexpr uint64_t kFateSalt = 0xfa7e'fa7e'fa7e'fa7e;

uint64_t mix(uint64_t a, uint64_t b) {
  uint64_t h = (a ^ (b + 0x9e3779b97f4a7c15)) * 0xff51afd7ed558ccd;
  return (h ^ (h >> 29)) | 1;
}

Error invalid(const std::string& text) { return Error(ErrorCode::invalid_argument, text); }

/// Throws if `rank` will never come to create the group.
void require_present(const Host& host, int rank) {
  const HostPeer& peer = host.peers[static_cast<size_t>(rank)];
  pollfd process{peer.process ? peer.process.get() : -1, POLLIN, 0};
  const bool dead = ::poll(&process, 1, 0) > 0;
  const auto state = static_cast<RankState>(host.segment->page(rank).state.value.load());
  if (!dead && state != RankState::left) return;
  Context where;
  where.rank = rank;
  where.pid = peer.info.pid;
  const std::string name =
      "rank " + std::to_string(rank) + " (pid " + std::to_string(peer.info.pid) + ")";
  if (state == RankState::left)
    throw Error(ErrorCode::early_exit, name + " left before it created the group", where);
  throw Error(ErrorCode::peer_lost, name + " died before it created the group", where);
}

/// Waits, as only the creation of a group does, until `rank` has published `key`.
uint64_t await(const Engine& engine, int rank, uint64_t key, Deadline deadline,
               const std::function<void()>& interrupted) {
  for (int looks = 0;; ++looks) {
    if (const auto offset = engine.host().segment->find(rank, key)) return *offset;
    if (deadline.passed(now()))
      throw Error(ErrorCode::stalled,
                  "rank " + std::to_string(rank) + " did not create the group in time");
    if (looks < 1000) {
      std::this_thread::yield();
    } else {
      require_present(engine.host(), rank);
      if (looks % 1000 == 0) interrupted();  // ten times a second
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
  }
}

void check_overlap(const Buffer& input, const Buffer& output, size_t allowed_offset) {
  const auto in = reinterpret_cast<uintptr_t>(input.data);
  const auto out = reinterpret_cast<uintptr_t>(output.data);
  const bool apart = in + input.bytes() <= out || out + output.bytes() <= in;
  if (apart || input.count == 0 || output.count == 0) return;
  if (in + allowed_offset == out || in == out + allowed_offset) return;
  throw invalid("input and output overlap, but are not in place");
}

/// The shape's count, as far as this rank's buffers tell it.
size_t count_of(Collective kind, const Buffer& input, const Buffer& output, int size) {
  const auto p = static_cast<size_t>(size);
  if (kind == Collective::scatter) return output.count;
  if (kind != Collective::all_to_all) return input.count;
  if (input.count % p != 0)
    throw invalid("all_to_all of " + std::to_string(input.count) + " elements on " +
                  std::to_string(p) + " ranks: the blocks would not be equal");
  return input.count / p;
}

/// Where the output begins in the input's memory, or the other way round, in place.
size_t in_place_offset(Collective kind, const Shape& shape) {
  switch (kind) {
    case Collective::reduce_scatter:
    case Collective::scatter:
    case Collective::all_gather:
    case Collective::gather:
      return share_of(kind, shape, shape.rank).offset;
    default:
      return 0;
  }
}

void check_buffers(Collective kind, const Buffer& input, const Buffer& output, const Shape& shape) {
  const std::string operation = std::string(name_of(kind));
  if (input.dtype != output.dtype)
    throw invalid("input is " + std::string(name_of(input.dtype)) + ", output is " +
                  std::string(name_of(output.dtype)));
  require_valid(kind, shape);
  const Sizes sizes = sizes_of(kind, shape);
  const auto require = [&](const char* what, const Buffer& buffer, size_t expected) {
    if (buffer.count == expected) return;
    throw invalid(std::string(what) + " has " + std::to_string(buffer.count) + " elements; " +
                  operation + " of " + std::to_string(input.count) + " elements on " +
                  std::to_string(shape.size) + " ranks needs " + std::to_string(expected));
  };
  require("input", input, sizes.input);
  require("output", output, sizes.output);
  check_overlap(input, output, in_place_offset(kind, shape) * size_of(input.dtype));
}

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
    : engine_(std::move(engine)), defaults_(std::move(defaults)) {
  const Host& host = engine_->host();
  const uint64_t fate_key = mix(key, kFateSalt);
  const int leader = members.front();
  // The lowest member owns the cell; the others publish only that they may look at it.
  std::byte* owned = nullptr;
  if (host.rank == leader) {
    owned = engine_->arena()->allocate(sizeof(FateCell));
    new (owned) FateCell;
  }
  host.segment->publish(host.rank, fate_key,
                        owned != nullptr ? *host.segment->offset_of(owned, 1) : 0);
  auto* cell = std::launder(reinterpret_cast<FateCell*>(
      host.segment->at(await(*engine_, leader, fate_key, deadline, defaults_.interrupted))));
  membership_.key = key;
  membership_.members = std::move(members);
  membership_.rank = static_cast<int>(
      std::find(membership_.members.begin(), membership_.members.end(), host.rank) -
      membership_.members.begin());
  membership_.lifeline = engine_->share_lifeline(*cell, fate_key, owned, membership_.members);
  membership_.abort = &cell->state.value;
  program_order_ = engine_->open_stream(membership_, "", 0);
}

Operation Group::checked(Collective kind, Buffer input, Buffer output, Options o) const {
  if (o.root < 0 || o.root >= size())
    throw invalid("root " + std::to_string(o.root) + " is not a rank of this group of " +
                  std::to_string(size()));
  Shape shape;
  shape.rank = rank();
  shape.size = size();
  shape.root = o.root;
  shape.count = o.counts.empty() ? count_of(kind, input, output, size()) : 0;
  shape.counts = o.counts;
  if (kind != Collective::barrier) check_buffers(kind, input, output, shape);
  if (folds(kind)) {
    if (!has_meaning(o.op, input.dtype))
      throw invalid(std::string(name_of(o.op)) + " has no meaning on " +
                    std::string(name_of(input.dtype)));
    if (input.dtype == DType::boolean && (o.prescale != 1 || o.postscale != 1))
      throw invalid("booleans cannot be scaled");
  }
  Operation operation;
  operation.kind = kind;
  operation.input = input;
  operation.output = output;
  operation.count = shape.count;
  operation.counts = std::move(o.counts);
  operation.op = o.op;
  operation.prescale = o.prescale;
  operation.postscale = o.postscale;
  operation.root = o.root;
  operation.name = std::move(o.name);
  operation.algorithm = o.algorithm.empty() ? defaults_.algorithm : std::move(o.algorithm);
  operation.level = o.level.value_or(defaults_.level);
  if (o.deadline)
    operation.deadline = *o.deadline;
  else if (defaults_.timeout > Duration::zero())
    operation.deadline = Deadline::after(defaults_.timeout);
  operation.keepalive = std::move(o.keepalive);
  operation.completion = std::move(o.completion);
  return operation;
}

Handle Group::submit(Collective kind, Buffer input, Buffer output, Options options,
                     bool caller_waits) {
  if (submitting_.exchange(true, std::memory_order_acquire))
    throw invalid(
        "two threads submit to one group at the same time; their order would differ "
        "between ranks");
  struct Leave {
    std::atomic<bool>& flag;
    ~Leave() { flag.store(false, std::memory_order_release); }
  } leave{submitting_};
  return submit_to(program_order_, kind, input, output, std::move(options), caller_waits);
}

Handle Group::submit_to(const std::shared_ptr<Stream>& stream, Collective kind, Buffer input,
                        Buffer output, Options options, bool caller_waits) {
  check();
  Operation operation = checked(kind, input, output, std::move(options));
  if (!operation.algorithm.empty()) stream->require_backend(operation);
  return engine_->submit(stream, std::move(operation), caller_waits);
}

std::shared_ptr<Stream> Group::open_stream(std::string label) {
  check();
  return engine_->open_stream(membership_, std::move(label), next_stream_++);
}

std::shared_ptr<Group> Group::split(int color, int key, Deadline deadline,
                                    const std::function<void()>& interrupted) {
  const std::array<int64_t, 2> mine{color, key};
  std::vector<std::array<int64_t, 2>> all(static_cast<size_t>(size()));
  Options options;
  options.name = "split";
  options.deadline = deadline;
  const Handle gathered = submit(
      Collective::all_gather,
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

void Group::wait_for(const Handle& handle, const std::function<void()>& interrupted) {
  const auto complete = [&] {
    try {
      return handle.wait(Deadline::after(std::chrono::milliseconds(100)));
    } catch (const Error&) {
      interrupted();  // goes before what another rank reports of the same interruption
      throw;
    }
  };
  while (!complete()) {
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
  membership_.lifeline->report(error);
  engine_->wake_everyone();
}

void Group::abort_interrupted() {
  Context where;
  where.rank = engine_->host().rank;
  where.pid = ::getpid();
  abort(Error(ErrorCode::remote_error,
              "rank " + std::to_string(where.rank) + " was interrupted (KeyboardInterrupt)",
              where));
}

void Group::check() const {
  if (membership_.lifeline->failed())
    if (const auto verdict = membership_.lifeline->verdict()) throw Error(*verdict);
}

std::shared_ptr<std::byte> Group::allocate(size_t bytes) {
  auto arena = engine_->arena();
  std::byte* data = arena->allocate(bytes);
  return {data, [arena](std::byte* p) { arena->release(p); }};
}

std::string Group::describe() const { return program_order_->describe(); }

}  // namespace farandole
