// Gradients that this rank's processor cannot read where they lie: on their way into buckets, or
// reduced there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "stream/operation.h"

namespace farandole {

class PartNorm;
class Shard;
enum class Norm : uint8_t;

/// How the gradients of a bucket go from here.
struct Carried {
  std::shared_ptr<Gate> gate;  // what the bucket in the host's memory waits for; null: nothing
  /// They are reduced where they lie, if those of all ranks can be; else they come to the bucket.
  std::shared_ptr<OnDevices> on_devices{};
};

/// Updates a sharded update's buckets whose parameters lie elsewhere, with their part of the state.
class ShardCarrier {
 public:
  virtual ~ShardCarrier() = default;
  /// The next update of a bucket, as the shard says for each parameter. Null: it runs on the bucket
  /// in the host's memory, where all that it needs is.
  virtual std::shared_ptr<OnDevices> launch(size_t bucket, Shard& shard) = 0;
  /// The same for a norm, whose terms come afterwards by finish_norm().
  virtual std::shared_ptr<OnDevices> launch_norm(size_t bucket, const Shard& shard, Norm norm) = 0;
  virtual void finish_norm(size_t bucket, PartNorm& norm) = 0;
  /// The shard's state is to be that of the last update; or is another one from now on.
  virtual void fetch_state(size_t bucket, Shard& shard) = 0;
  virtual void replace_state(size_t bucket, Shard& shard) = 0;
};

/// Copies gradients into buckets, or has them reduced where they lie. A reducer keeps its carriers.
class Carrier {
 public:
  virtual ~Carrier() = default;
  /// Whether it brings this parameter's gradients. Then nobody else writes to their place in the
  /// bucket between two launches: what it brought back from there may still be on its way.
  virtual bool carries(size_t parameter) const = 0;
  /// All of this step's gradients of a bucket are known. They stay where they lie, or the bucket
  /// waits until they have come, were prescaled, and zeros stand for those that there are not.
  /// Neither where none of its parameters is carried. Under the reducer's lock.
  virtual Carried launch(size_t bucket) = 0;
  /// The buckets go, and others come in their place. While nothing of a step is in flight.
  virtual void let_go() = 0;
};

/// Several, of which no two carry one parameter; a bucket may have parameters of many.
class Carriers : public Carrier {
 public:
  void add(std::shared_ptr<Carrier> carrier) { all_.push_back(std::move(carrier)); }

  bool carries(size_t parameter) const override;
  Carried launch(size_t bucket) override;
  void let_go() override;

 private:
  std::vector<std::shared_ptr<Carrier>> all_;
};

}  // namespace farandole
