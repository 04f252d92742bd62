// Included by multimem.h: as a host executor gives it.
#pragma once

namespace farandole::cuda {

/// An executor defines these.
namespace host {
/// Where the members of a multicast object have what lies at an address of it, and `bytes` on.
struct Members {
  uint32_t count;
  void* at[kMostRanks];
};
Members members_at(const void* address, size_t bytes);
}  // namespace host

FARANDOLE_DEVICE void order_addresses() { host::interleave(); }

/// From the last member to the first: no order that anybody promises. Rounded once.
template <typename E, Formula formula>
FARANDOLE_DEVICE Packed<E> load_folded(const Packed<E>* from) {
  using A = Element<E>;
  const host::Members all = host::members_at(from, sizeof *from);
  Packed<E> unit[kMostRanks];
  for (uint32_t m = 0; m < all.count; ++m)
    unit[m] = load_peer(static_cast<const Packed<E>*>(all.at[m]));
  Packed<E> folded{};
  if (all.count == 0) return folded;  // the executor knows that it is wrong
  for (uint32_t i = 0; i < kPerPack<E>; ++i) {
    auto value = A::widen(unit[all.count - 1].bits[i]);
    for (uint32_t m = all.count - 1; m-- > 0;)
      value = A::fold(formula, value, A::widen(unit[m].bits[i]));
    folded.bits[i] = A::narrow(value);
  }
  return folded;
}

template <typename U>
FARANDOLE_DEVICE void store_to_all(U* to, const U& unit) {
  const host::Members all = host::members_at(to, sizeof unit);
  for (uint32_t m = 0; m < all.count; ++m) store_peer(static_cast<U*>(all.at[m]), unit);
}

}  // namespace farandole::cuda
