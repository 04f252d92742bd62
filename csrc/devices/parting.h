// How ranks that have mapped memory of each other's part: each tells the others once it uses
// nothing of theirs any more, so that an owner frees what it gave only when nobody has it open.
#pragma once

#include <functional>
#include <vector>

#include "base/fd.h"

namespace farandole {

/// Over the sockets by which they met: what is told is that one ends. Never blocks. By one thread.
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

  /// Of a place. A dead rank uses nothing, though a child of its may keep its socket open.
  using IsDead = std::function<bool(int)>;
  /// Whether another one has told so: nothing is common any more.
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
