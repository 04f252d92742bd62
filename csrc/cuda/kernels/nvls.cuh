// A fold by the switch between the devices.
#pragma once

#include "cuda/kernels/device.h"
#include "cuda/kernels/multimem.h"

namespace farandole::cuda {

template <typename E, Formula formula>
FARANDOLE_DEVICE void nvls_fold_by(const NvlsFold& p) {
  if constexpr (kFoldedBySwitch<E, formula>) {
    const Turns<uint64_t> turns = turns_of_grid();
    for (uint64_t i = turns.first; i < p.packs; i += turns.step) {
      auto* const at = static_cast<Packed<E>*>(p.all) + i;
      store_to_all(at, scale_unit(load_folded<E, formula>(at), p.finish));
    }
  }
}

/// By all threads of the grid. One of each block looks at the abort word, which lies far away.
template <typename E>
FARANDOLE_DEVICE void nvls_fold(const NvlsFold& p) {
  if (!block_all(thread_index() != 0 || load_acquire(p.abort) == 0)) return;
  order_addresses();
  switch (p.formula) {
    case Formula::add:
      nvls_fold_by<E, Formula::add>(p);
      break;
    case Formula::smaller:
      nvls_fold_by<E, Formula::smaller>(p);
      break;
    case Formula::larger:
      nvls_fold_by<E, Formula::larger>(p);
      break;
    case Formula::multiply:  // nobody asks for it
      break;
  }
  order_addresses();
}

}  // namespace farandole::cuda
