// Teardown among ranks that have mapped each other's memory. Each tells the others once it uses
// nothing of theirs any more, so that an owner frees memory only when nobody has it open.
#pragma once

#include <functional>
#include <vector>

#include "base/fd.h"

namespace farandole {

/// Uses the sockets of the meeting: a rank tells by closing its own. Never blocks. By one thread.
class PeerParting {
 public:
  struct From {
    int member = -1;  // by place; less than 0: not known yet
    Fd socket;
  };
  /// To the others and from them, as far as they came to meet this rank.
  PeerParting(std::vector<Fd> to, std::vector<From> from);

  /// This rank uses nothing of the others' any more.
  void tell();
  bool told() const { return told_; }

  /// Whether the rank at this place is dead. Then it uses nothing, though its child may keep its
  /// socket open.
  using IsDead = std::function<bool(int)>;
  /// Whether another one has told so: memory is not shared by all any more.
  bool has_begun(const IsDead& is_dead);
  /// Whether all others have.
  bool is_over(const IsDead& is_dead);

 private:
  void listen(const IsDead& is_dead);

  std::vector<Fd> to_;
  std::vector<From> from_;  // those that have told nothing
  size_t others_;
  bool told_ = false;
};

}  // namespace farandole
