// Gradients that this rank's processor cannot read where they lie: on their way into buckets, or
// used there.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <vector>

#include "stream/operation.h"

namespace farandole {

class PartNorm;
class Shard;

/// How the gradients of a bucket go from here.
struct Carried {
  std::shared_ptr<Gate> gate;  // what the bucket in the host's memory waits for; null: nothing
  /// They are reduced where they lie, if those of all ranks can be; else they come to the bucket.
  std::shared_ptr<OnDevices> on_devices{};
};

/// Copies gradients into buckets, or has them used where they lie: reduced, or to update what lies
/// there. A step keeps its carriers.
class Carrier {
 public:
  virtual ~Carrier() = default;
  /// Whether it brings this parameter's gradients. Then nobody else writes to their place in the
  /// bucket between two launches: what it brought back from there may still be on its way.
  virtual bool carries(size_t parameter) const = 0;
  /// All of this step's gradients of a bucket are known. They stay where they lie, or the bucket
  /// waits until they have come, were prescaled, and zeros stand for those that there are not.
  /// Neither where none of its parameters is carried. Under a reducer's lock.
  virtual Carried launch(size_t bucket) = 0;
  /// The buckets go, and others come in their place. While nothing of a step is in flight.
  virtual void let_go() = 0;
  /// The step ends, and its memory goes afterwards: waits for what uses that. Also where its group
  /// has failed and an operation is still to come to the host, which it is refused from now on.
  virtual void end() noexcept = 0;
};

/// What a sharded update asks of a carrier besides.
class ShardCarrier {
 public:
  virtual ~ShardCarrier() = default;
  /// Adds the terms of a norm, if they are made where the gradients lie.
  virtual void finish_norm(size_t bucket, PartNorm& norm) = 0;
  /// The shard's state is to be that of the last update; or is another one from now on.
  virtual void fetch_state(size_t bucket, Shard& shard) = 0;
  virtual void replace_state(size_t bucket, Shard& shard) = 0;
};

/// Several, of which no two carry one parameter; a bucket may have parameters of many.
class Carriers : public Carrier {
 public:
  void add(std::shared_ptr<Carrier> carrier) { all_.push_back(std::move(carrier)); }

  bool carries(size_t parameter) const override;
  Carried launch(size_t bucket) override;
  void let_go() override;
  void end() noexcept override;

 private:
  std::vector<std::shared_ptr<Carrier>> all_;
};

}  // namespace farandole
