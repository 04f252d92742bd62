// One operation by name, as it is asked for and as it is on its way.
#pragma once

#include <atomic>
#include <memory>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "group/pack.h"
#include "named/negotiator.h"
#include "stream/operation.h"
#include "stream/stream.h"

namespace farandole {

/// One tensor as its owner gives it. Collectives whose result depends on the other ranks
/// (all_gather, all_to_all) are given no output: it is made when its size is known.
struct NamedTensor : Operand {
  std::span<const int64_t> shape;  // of the input
};

struct NamedRequest;

/// Is notified of the end of a request whose owner does not wait, or makes memory for its results.
class NamedListener {
 public:
  virtual ~NamedListener() = default;
  /// By the thread that polls, for a result whose shape is known only now. Must not wait; null:
  /// there is no memory left.
  virtual std::byte* make_room(size_t part, std::span<const int64_t> shape) = 0;
  /// Once, by any thread, when nobody polls: the request is to be read and released.
  virtual void finished(NamedRequest& request) = 0;
};

/// The arguments of an operation by name. Refers to the caller's memory.
struct NamedCall : CollectiveSpec {  // the root: a world rank
  explicit NamedCall(const CollectiveSpec& what = {}) : CollectiveSpec(what) {}

  std::string_view name;  // empty: "noname.n" for the n-th such one of this kind in this set
  uint32_t set = 0;
  std::span<const NamedTensor> tensors;
  /// By tensor, where some may be reduced on devices; null: not this one. Those travel alone.
  std::span<const std::shared_ptr<OnDevices>> on_devices;
  std::span<const int64_t> splits;
  std::string_view note;              // compared between ranks, line by line
  NamedListener* listener = nullptr;  // lives until it is notified; null: the core makes room
  bool waits = true;                  // a thread will wait; else the listener is notified
  std::shared_ptr<Gate> gate;         // of its operations: tensors are still on their way here
  Completion completion;              // as an operation's; nothing where the listener is notified
};

/// A set of ranks as a member sees it.
struct NamedSet {
  uint32_t number = 0;
  std::vector<int> members;        // world ranks, ascending
  int rank = -1;                   // this one, in the set; -1: it is no member
  std::shared_ptr<Stream> stream;  // null on others
  Membership membership;
  Duration timeout{};
  std::string algorithm;
  Determinism level = Determinism::canonical;

  int size() const { return static_cast<int>(members.size()); }
};

/// Memory that the core has made for a result.
struct MadeResult {
  std::shared_ptr<std::byte> data;
  Buffer buffer;
  std::vector<int64_t> shape;
};

struct NamedRequest {
  struct Part : Operand {
    MadeResult made;
    std::shared_ptr<OnDevices> on_devices;
  };
  std::atomic<bool> finished{false};  // released after everything else has been written
  std::optional<Error> error;
  Name* name = nullptr;  // while in flight; null: join, or a stand-in
  std::vector<Part> parts;
  size_t parts_left = 0;
  std::vector<int64_t> received;  // all_to_all: rows that came from each member
  int last_joined = -1;           // join
  TimePoint joined_at{};          // join: when it was called
  bool submitted = false, ordered = false;
  NamedListener* listener = nullptr;
  bool waits = true;
  std::shared_ptr<Gate> gate;
  Completion completion;

  // For a rank that has joined: a stand-in owns its signature and memory.
  std::unique_ptr<Signature> signature;
  std::vector<std::unique_ptr<std::byte[]>> memory;

  // While it waits for its order.
  TimePoint since{};
  std::vector<int> missing;  // as rank 0 says
  bool told = false, warned = false;

  const Signature& described() const { return signature ? *signature : name->signature; }
};

/// Cache lines of this process' own.
std::shared_ptr<std::byte> allocate_result(size_t bytes);

/// Throws Error(invalid_argument) for what this rank can know to be wrong.
void check(const NamedCall& call, const NamedSet& set);
bool matches(const Signature& signature, const NamedCall& call);
/// `name`: its own, or what it is called for want of one; that one does not last.
Signature signature_of(const NamedCall& call, std::string_view name);

/// Gives every part of the request the memory it lacks, now that the extents of all members are
/// known: results that others decide the size of, and for a stand-in everything. Throws
/// Error(resource) when there is none.
void complete_parts(NamedRequest& request, const NamedSet& set, std::span<const int64_t> extents);
/// The operation of one part by itself.
Operation operation_of(const NamedRequest& request, size_t part, const NamedSet& set,
                       std::span<const int64_t> extents);

}  // namespace farandole
