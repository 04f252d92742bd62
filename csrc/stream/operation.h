// Operations: requests to the engine.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "base/clock.h"
#include "base/dtype.h"
#include "base/error.h"
#include "schedule/collective_spec.h"
#include "stream/bundle.h"

namespace farandole {

/// Elements in memory of this process. Sizes are in elements.
struct Buffer {
  std::byte* data = nullptr;
  size_t count = 0;
  DType dtype = DType::float32;

  size_t bytes() const { return count * size_of(dtype); }
  bool operator==(const Buffer&) const = default;
};

/// Called once, after the token is released, on whichever thread drove; never takes Python's lock.
using Completion = std::function<void(const Error*)>;

/// A condition of this rank alone for an operation to begin: its input has come. The thread that
/// polls asks it, and is woken (Engine::wake) when the answer changes.
class Gate {
 public:
  virtual ~Gate() = default;
  /// Never blocks. Throws an error that keeps it shut for ever, which fails the group.
  virtual bool is_open() = 0;
  /// "a copy from device 0"
  virtual std::string awaited() const = 0;
};

class Backend;
struct Operation;

/// The arrays of an operation that lie on devices and come to the host in pieces, and their results
/// on the way back. By the thread that polls.
class PiecesOnDevices {
 public:
  virtual ~PiecesOnDevices() = default;
  /// Sets the next piece's buffers on the host, and the gate that it waits for.
  virtual void begin(Operation& piece) = 0;
  /// The piece has run.
  virtual void end() = 0;
};

/// Runs an operation whose arrays lie on devices. Ranks agree on whether they all do.
class OnDevices {
 public:
  virtual ~OnDevices() = default;
  virtual Backend& backend() = 0;
  /// Whether this rank knows beforehand that the operation goes by the host, as its backend says.
  virtual bool declines() const { return false; }
  /// Elements of a piece (Cut) if the operation goes by the host in pieces; 0: as a whole. The same
  /// on all ranks that have arrays on devices.
  virtual size_t piece() const { return 0; }
  /// Called if not all ranks' arrays lie on devices, or devices cannot run it. Begins to copy them
  /// to the host, and makes the operation one on memory there. Or returns its pieces, if `piece`,
  /// on which all ranks agree, is not 0.
  virtual std::shared_ptr<PiecesOnDevices> go_by_host(Operation& operation, size_t piece) = 0;
  /// Whether its `algorithm` names a way of devices: then it goes so or not at all.
  virtual bool is_named() const { return false; }
};

/// Bytes of the elements that an epilogue gets at a time, from where its rank's part begins.
inline constexpr size_t kEpilogueBytes = 8 << 10;

/// Turns the sums of an all-reduce over memory that all ranks map into its results, before they are
/// stored. The thread that polls asks a rank for its own part of the elements alone, each once, in
/// pieces. All ranks get the rank's answer.
class Epilogue {
 public:
  virtual ~Epilogue() = default;
  /// The reduced elements [first, first + count) stand in `reduced`. Turns `result`, this rank's
  /// output there, from what it was into what is stored on every rank. `result` is not `reduced`.
  virtual void apply(std::byte* result, const std::byte* reduced, size_t first, size_t count) = 0;
  /// False: apply() only looks, and no rank's output changes.
  virtual bool stores() const { return true; }
};

/// One rank's share of a collective. Input and output hold what sizes_of(kind, shape) says
/// (schedule/slicing.h); a rank that reads or gets nothing has an empty buffer there.
struct Operation : CollectiveSpec {
  Buffer input;
  Buffer output;
  size_t count = 0;            // the shape's, equal on all ranks: what they agree on
  std::vector<size_t> counts;  // the shape's, for uneven forms; empty: equal shares
  std::string name;
  std::string algorithm;  // empty: the engine chooses; else a backend's path or a planner by name
  Determinism level = Determinism::canonical;
  uint32_t hash = 0;  // hash_of() this, kept by a caller that repeats an operation; 0: not known
  std::shared_ptr<Bundle> bundle;         // the call's, where it becomes several operations
  std::shared_ptr<Epilogue> epilogue;     // goes with algorithm "mapped" alone
  std::shared_ptr<Gate> gate;             // null: it may begin at once
  std::shared_ptr<OnDevices> on_devices;  // null: input and output are memory of this process
  Deadline deadline;
  Duration timeout{};  // besides, from the first look around after it has started; zero: none
  std::shared_ptr<const void> keepalive;
  Completion completion;
};

/// As one of `size` ranks sees it.
inline Shape shape_of(const Operation& operation, int rank, int size) {
  Shape shape;
  shape.rank = rank;
  shape.size = size;
  shape.count = operation.count;
  shape.counts = operation.counts;
  shape.root = operation.root;
  return shape;
}

}  // namespace farandole
